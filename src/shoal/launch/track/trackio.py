"""trackio: in its own folder of this machine (TRACKIO_DIR), or where TRACKIO_SPACE_ID says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.launch.track.tracker import PROJECT, Held, TrackedRun


class Trackio:
    def open(self, run: TrackedRun, held: Held) -> Held:
        import trackio

        # It finds a run by its name, which another directory's run may have too.
        name = held.id or f"{run.name}-{run.id[:8]}"
        self._run: Any = trackio.init(
            project=run.project or PROJECT,
            name=name,
            config={**run.config, "layout": run.layout},
            resume="allow",
            embed=False,
        )
        # It writes from a thread of its own and cannot be asked to be done with it. So after a kill what it has is
        # what counts, more or less than was noted; it keeps that as the number of the next step.
        following = getattr(self._run, "_next_step", None)
        return Held(name, held.step if following is None else max(0, following - 1))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Its own thread does, twice a second."""

    def attach(self, path: Path) -> None:
        self._run.log_artifact(str(path), name=path.name, type="run")

    def close(self, finished: bool) -> None:
        self._run.finish()
