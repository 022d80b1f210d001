"""MLflow: to MLFLOW_TRACKING_URI, or to a database in the run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.launch.track.tracker import PROJECT, Held, TrackedRun

ADDRESS = "MLFLOW_TRACKING_URI"
# MLflow's limits per request.
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 500
# A metric that every row has.
ALWAYS = "tokens"


class MLflow:
    def open(self, run: TrackedRun, held: Held) -> Held:
        from mlflow import MlflowClient

        folder = run.path.resolve()
        address = os.environ.get(ADDRESS)
        self._client: Any = MlflowClient(tracking_uri=address or f"sqlite:///{folder / 'mlflow.db'}")
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        if held.id is not None:
            self._id = held.id
            self._client.update_run(self._id, status="RUNNING")
            there = self._client.get_metric_history(self._id, ALWAYS)
            held = Held(self._id, max([held.step, *(point.step for point in there)]))
        else:
            project = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self._client.get_experiment_by_name(project)
            artifacts = None if address else (folder / "mlflow-artifacts").as_uri()
            number = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(project, artifact_location=artifacts)
            )
            self._id = self._client.create_run(number, run_name=run.name).info.run_id
            self._parameters(run.config)
            held = Held(self._id, 0)
        # A tag: a parameter keeps its first value, but a run's layout may change.
        self._client.set_tag(self._id, "layout", run.layout)
        return held

    def _parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = [Param(name, str(value)[:LONGEST]) for name, value in config.items()]
        for start in range(0, len(known), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=known[start : start + MOST_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._waiting.append((step, values))

    def flush(self) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch: list[Any] = []
        for step, values in self._waiting:
            # A step is sent in one batch, so it is there completely or not at all.
            if len(batch) + len(values) > MOST_METRICS:
                self._client.log_batch(self._id, metrics=batch)
                batch = []
            batch += [Metric(name, value, now, step) for name, value in values.items()]
        if batch:
            self._client.log_batch(self._id, metrics=batch)
        self._waiting = []

    def attach(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self, finished: bool) -> None:
        self.flush()
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
