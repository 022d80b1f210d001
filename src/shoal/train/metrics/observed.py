"""One step of a run under observation: what this rank sent and received, and what it held at its fullest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from shoal.observe.collectives import CollectiveCounter
from shoal.observe.memory import MemoryTracker
from shoal.parallel.mesh import Mesh
from shoal.train.program import Program

# The second step of a process: in the first one optimizer states are made and connections set up.
OBSERVED_STEP = 2


@contextmanager
def observed(program: Program, mesh: Mesh, path: Path, step: int) -> Iterator[None]:
    """Count and track what happens inside, and write it down. It slows the step, and changes nothing else."""
    tracker = MemoryTracker(round_to=512 if mesh.device.type == "cuda" else 1)
    with CollectiveCounter(mesh.names) as counter, tracker:
        _mark(tracker, program)
        tracker.reset_peak()
        yield
        _mark(tracker, program)  # gradients are there only now
    seen = {
        "step": step,
        "rank": mesh.rank,
        "layout": str(program.job.layout),
        "traffic": [asdict(row) for row in counter.traffic()],
        "peak": tracker.peak,
        "peak_by_category": tracker.peak_by_category(),
    }
    path.write_text(json.dumps(seen, indent=2) + "\n", encoding="utf-8")


def _mark(tracker: MemoryTracker, program: Program) -> None:
    """What is neither a parameter, a gradient nor an optimizer state is "other": activations, logits, buffers."""
    tracker.mark((part.local for _, part in program.placed.slices), "params")
    tracker.mark((piece.tensor for piece in program.pieces), "params")
    tracker.mark((piece.tensor.grad for piece in program.pieces if piece.tensor.grad is not None), "grads")
    for states in program.optimizer.state.values():
        tracker.mark((value for value in states.values() if hasattr(value, "untyped_storage")), "optimizer")
