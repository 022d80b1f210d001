"""One observed step: what this rank communicated, and what it held at its peak."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shoal.facts.ledger import HOST
from shoal.observe.attribution import Attributions, module_of
from shoal.observe.collectives import CollectiveCounter
from shoal.observe.memory import AllocationSite, MemoryTracker
from shoal.parallel.shard import FullyShard
from shoal.train.data.loader import Batch
from shoal.train.step import Step

# The second step of a process: the first creates optimizer states and sets up connections.
OBSERVED_STEP = 2
# CUDA's allocator rounds every tensor up to this.
ALIGNMENT = 512


@dataclass(frozen=True)
class Watch:
    """What is counted and tracked."""

    counter: CollectiveCounter
    tracker: MemoryTracker


def counter_of(step: Step) -> CollectiveCounter:
    return CollectiveCounter(step.mesh.names, step.mesh.purposes, log=True)


@contextmanager
def watched(
    step: Step,
    batches: Sequence[Batch],
    *,
    aligned: bool,
    fake: bool = False,
    counter: CollectiveCounter | None = None,
) -> Iterator[Watch]:
    """Count and track what happens inside the context. It slows the step, and changes nothing else.

    ``aligned``: round sizes as CUDA's allocator does. ``fake``: count tensors without data, which the step uses.
    ``counter``: one that has already counted the step's first collectives.
    """
    placed, mesh = step.placed, step.mesh
    networks = [segment.network for segment in placed.segments]
    origins = Attributions(networks, placed.gradients.computed_with(), mesh.purposes)
    tracker = MemoryTracker(round_to=ALIGNMENT if aligned else 1, fake=fake, origins=origins)
    counter = counter or counter_of(step)
    with origins, counter, tracker:
        _mark(tracker, step, batches)
        tracker.reset_peak()
        hooks = _marks_as_they_add_up(tracker, step)
        with _marks_between_replicas(tracker, step):
            yield Watch(counter, tracker)
        for hook in hooks:
            hook.remove()
        _mark(tracker, step, batches)  # gradients exist only now


def _marks_as_they_add_up(tracker: MemoryTracker, step: Step) -> list[RemovableHandle]:
    """FSDP accumulates whole gradients over a pipeline's micro-batches, and none of them exists at the end."""
    layout = step.mesh.layout
    if layout.pp == 1 or layout.shards == 1 or layout.zero != 3:
        return []

    def arrived(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.mark([parameter.grad], "grads")

    return [
        parameter.register_post_accumulate_grad_hook(arrived)
        for parameter in step.placed.gradients.computed_with()
    ]


@contextmanager
def _marks_between_replicas(tracker: MemoryTracker, step: Step) -> Iterator[None]:
    """With replicas of shards, FSDP holds one replica's sums internally until the last micro-batch."""
    gradients = step.placed.gradients
    if not isinstance(gradients, FullyShard):
        yield
        return
    after_backward = gradients.after_backward

    def mark(stage: int, last: bool) -> None:
        after_backward(stage, last)
        tracker.mark(gradients.adding_up(), "grads")

    with patch.object(gradients, "after_backward", mark):
        yield


@contextmanager
def observed(
    step: Step, batches: Sequence[Batch], path: Path, number: int, counter: CollectiveCounter
) -> Iterator[None]:
    """Observe what happens inside the context, and write it to a file."""
    mesh = step.mesh
    with watched(step, batches, aligned=mesh.device.type == "cuda", counter=counter) as watch:
        yield
    seen = {
        "step": number,
        "rank": mesh.rank,
        "layout": str(mesh.layout),
        "traffic": [asdict(row) for row in watch.counter.traffic()],
        "peak": watch.tracker.peak,
        "peak_by_category": watch.tracker.peak_by_category(),
        "peak_by_module": by_module(watch.tracker.peak_by_place()),
        "peak_at": str(watch.tracker.peak_origin),
        "host": step.host_bytes,
        "nvme": step.nvme_bytes,
    }
    path.write_text(json.dumps(seen, indent=2) + "\n", encoding="utf-8")


def by_module(places: Mapping[AllocationSite, int]) -> dict[str, int]:
    """Bytes per module, largest first; bytes outside any module have an empty name."""
    total: Counter[str] = Counter()
    for place, size in places.items():
        total[place.module] += size
    return dict(total.most_common())


def _mark(tracker: MemoryTracker, step: Step, batches: Sequence[Batch]) -> None:
    """Tell the tracker the purpose of tensors that it cannot infer from where they were allocated."""
    pieces = step.pieces
    tracker.mark(step.placed.host.buffers, HOST)
    for batch in batches:
        ends = [] if batch.documents is None else [batch.documents.ends]
        tracker.mark((batch.tokens, batch.targets, batch.positions, *ends), "activations")
    resting = {id(one.untyped_storage()) for one in step.placed.host.buffers}
    for name, part in step.placed.weights:
        if id(part.local.untyped_storage()) not in resting:
            tracker.mark([part.local], "params", module_of(name))
    fetched = {} if step.placed.fetched is None else step.placed.fetched.homes
    for segment in step.placed.segments if fetched else ():
        for name, parameter in segment.network.named_parameters():
            if parameter in fetched:
                tracker.mark([parameter], "buffers", module_of(name))
    for piece in pieces:
        kind = "optimizer" if piece.held.has_master else "params"
        tracker.mark([piece.tensor], kind if piece.away is None else HOST, module_of(piece.name))
        # A gradient that leaves the device belongs to its parameter until then.
        found = piece.tensor.grad if piece.away is None else piece.held.parameter.grad
        if found is not None:
            tracker.mark([found], "grads", module_of(piece.name))
        states = step.optimizer.state.get(piece.tensor, {}).values()
        tracker.mark(
            (value for value in states if isinstance(value, Tensor)),
            "optimizer" if piece.away is None else HOST,
            module_of(piece.name),
        )
