"""trackio: in its own directory on this machine (TRACKIO_DIR), or in TRACKIO_SPACE_ID."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.launch.track.tracker import PROJECT, Held, TrackedRun


class Trackio:
    def open(self, run: TrackedRun, held: Held) -> Held:
        import trackio

        # It finds a run by name, which a run in another directory may share.
        name = held.id or f"{run.name}-{run.id[:8]}"
        self._run: Any = trackio.init(
            project=run.project or PROJECT,
            name=name,
            config={**run.config, "layout": run.layout},
            resume="allow",
            embed=False,
        )
        # It writes from its own thread and cannot be flushed. So after a kill, what it has is what counts, more or less
        # than was recorded; it keeps that as the index of the next step.
        following = getattr(self._run, "_next_step", None)
        return Held(name, held.step if following is None else max(0, following - 1))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing to do: its own thread flushes twice a second."""

    def attach(self, path: Path) -> None:
        self._run.log_artifact(str(path), name=path.name, type="run")

    def close(self, finished: bool) -> None:
        self._run.finish()
