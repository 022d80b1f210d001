"""Weights & Biases: online with a key, or to files in ``RUN/wandb`` with WANDB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.launch.track.tracker import PROJECT, Held, TrackedRun


class WeightsAndBiases:
    def open(self, run: TrackedRun, held: Held) -> Held:
        import wandb

        # Its process runs beside the launcher, whose git state, code and output are not the run's.
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        self._folder = run.path
        self._run: Any = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            id=held.id or run.id,
            resume="allow",
            dir=str(run.path),
            config={**run.config, "layout": run.layout},
            allow_val_change=True,
            settings=settings,
        )
        # A server reports where a run continues; files of an offline run do not.
        there = self._run.starting_step - 1 if self._run.resumed else 0
        return Held(self._run.id, max(held.step, there))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing to do: its service has what was logged, and outlives us."""

    def attach(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(self._folder), policy="now")

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
