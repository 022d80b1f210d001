"""TensorBoard: event files in ``RUN/tensorboard``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.launch.track.tracker import Held, TrackedRun

FOLDER = "tensorboard"
# Text files to show; TensorBoard has no place for pages such as a report.
SHOWN = (".json", ".toml")


class TensorBoard:
    """Uses TensorBoard's own writer: torch's would import torch into the process beside the launcher."""

    def open(self, run: TrackedRun, held: Held) -> Held:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(str(run.path / FOLDER))
        self._step = held.step
        if held.step:
            # At this mark TensorBoard drops what a kill left in the files beyond the recorded step.
            self._add(held.step + 1, session_log=SessionLog(status=SessionLog.START))
        return Held(FOLDER, held.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._step = step
        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=numbers))

    def flush(self) -> None:
        self._writer.flush()

    def attach(self, path: Path) -> None:
        # TensorBoard's own function for this requires TensorFlow.
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shown = f"[{path.name}]({path.resolve().as_uri()}), a page in the run's directory"
        if path.suffix in SHOWN:
            text = path.read_text(encoding="utf-8", errors="replace")
            shown = "\n".join(f"    {line}" for line in text.splitlines())
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        content = TensorProto(dtype=DT_STRING, string_val=[shown.encode()])
        value = Summary.Value(tag=path.name, metadata=kind, tensor=content)
        self._add(self._step, summary=Summary(value=[value]))

    def close(self, finished: bool) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), **what))
