"""What the tests of sharded layouts share: a small run on real ranks, and the same run in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.model.tensor_split import Box
from shoal.facts.traffic import Traffic
from shoal.models.decoder import build
from shoal.models.initial import fill
from shoal.observe.collectives import CollectiveCounter
from shoal.observe.memory import MemoryTracker
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.parallel.shards import GroupOf, gradient
from shoal.parallel.stage_module import MicroBatch

SEQ = 6
ROWS = 8  # of a global batch
SMALL: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": 4,
    "hidden": 12,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 6,
    "ffn": 20,
    "vocab": 263,
    "max_positions": 32,
    "init_std": 0.3,
}
GPT2 = {"norm": "layer", "gated": False, "positions": "learned", "tied": True}
GPT2 |= {
    "out_bias": True,
    "mlp_bias": True,
}  # a key's bias has no gradient but noise where nothing is rotated


@dataclass(frozen=True)
class Case:
    layout: str
    changes: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, Any] = field(default_factory=lambda: {"bucket_mb": 0.02})
    micro_batches: int = 2  # of each data rank
    reduce_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float64
    compute: torch.dtype | None = None  # None: the parameters' dtype
    strict: bool = False
    groups: Callable[[Layout], GroupOf] | None = None  # other ones than the layout's
    transform: Callable[[nn.Module], None] | None = None  # of the network, before it is placed
    transform_placed: Callable[[nn.Module], None] | None = None  # or after

    @property
    def model(self) -> Model:
        return Model(**{**SMALL, **self.changes})


@dataclass(frozen=True)
class Part:
    """A piece, as a rank sends it home."""

    name: str
    box: Box
    start: int
    stop: int
    counted: bool
    gradient: Tensor
    value: Tensor

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.box.slices].reshape(-1)[self.start : self.stop]


def place(case: Case, rank: int) -> tuple[Placed, Mesh]:
    layout = Layout.parse(case.layout)
    mesh = Mesh(layout, rank, torch.device("cpu"))
    network = build(case.model, compute=case.compute or case.dtype, dtype=case.dtype)
    if case.transform is not None:
        case.transform(network)
    tune = TuneSection(**case.tune)
    values = partial(fill, model=case.model, seed=0)
    group_of = None if case.groups is None else case.groups(layout)
    placed = apply(network, mesh, tune, values, SEQ, case.reduce_dtype, case.strict, group_of)
    if case.transform_placed is not None:
        for segment in placed.segments:
            case.transform_placed(segment)
    return placed, mesh


def rows(model: Model, first: int, count: int) -> MicroBatch:
    tokens = torch.arange(SEQ) * 7 + torch.arange(first, first + count)[:, None] * 13
    tokens = tokens % model.vocab
    positions = torch.arange(SEQ).expand(count, SEQ).contiguous()
    return MicroBatch(tokens, positions, None, tokens.roll(-1, 1), None)


def batches(case: Case, mesh: Mesh) -> list[MicroBatch]:
    """This rank's rows of the global batch."""
    count = ROWS // (mesh.layout.dp * mesh.layout.fsdp) // case.micro_batches
    first = mesh.data_index * count * case.micro_batches
    return [rows(case.model, first + number * count, count) for number in range(case.micro_batches)]


def steps(placed: Placed, mesh: Mesh, case: Case, count: int) -> Iterator[torch.optim.Optimizer]:
    """Training steps; each stops here after its update, with the gradients still there."""
    tensors = [piece.tensor for piece in placed.gradients.pieces]
    # AdamW divides by the gradient's size + eps: of a gradient near zero, a smaller eps would make a whole
    # step out of its last digits, which differ with the order of a sum.
    optimizer = torch.optim.AdamW(tensors, lr=1e-2, eps=1e-3, foreach=False)
    for _ in range(count):
        here = batches(case, mesh)
        placed.start_step(len(here))
        placed.executor.forward_backward(here, 1 / (ROWS * SEQ))
        placed.finish_step(ROWS)
        for piece in placed.gradients.pieces:
            if piece.away is not None:
                piece.tensor.grad = gradient(piece)
        optimizer.step()
        placed.after_update()
        yield optimizer


def train(rank: int, world: int, case: Case) -> list[Part]:
    """Two steps, an evaluation between them: the second step's gradients and the parameters after it."""
    placed, mesh = place(case, rank)
    for _ in steps(placed, mesh, case, 2):
        placed.executor.forward_only(batches(case, mesh))
        placed.executor.scores(rows(case.model, 0, 1), SEQ - 1)
    parts = []
    for piece in placed.gradients.pieces:
        found = piece.tensor.grad
        assert found is not None and found.dtype == piece.tensor.dtype
        flat = found.reshape(-1).clone(), piece.tensor.detach().reshape(-1).clone()
        parts.append(Part(piece.name, piece.box, piece.start, piece.stop, piece.counted, *flat))
    return parts


def reference(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and parameters of the same run in one process that sees the whole batch at once."""
    return _reference(tuple(sorted(case.changes.items())), case.transform or case.transform_placed)


@lru_cache(maxsize=8)
def _reference(
    changes: tuple[tuple[str, Any], ...], transform: Callable[[nn.Module], None] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parts = train(0, 1, Case("dp=1", dict(changes), micro_batches=1, transform=transform))
    gradients = {part.name: part.gradient.view(part.box.whole) for part in parts}
    values = {part.name: part.value.view(part.box.whole) for part in parts}
    return gradients, values


def assert_equal(case: Case, ranks: list[list[Part]], tolerance: float = 1e-12) -> None:
    """Every piece is that part of the reference, and the pieces that count cover every parameter once."""
    gradients, values = reference(case)
    covered = {parameter.name: torch.zeros(parameter.shape) for parameter in llama_parameters(case.model)}
    for parts in ranks:
        for part in parts:
            for found, expected in ((part.gradient, gradients), (part.value, values)):
                largest = expected[part.name].abs().max()
                difference = (found - part.of(expected[part.name])).abs().max() / largest
                assert difference <= tolerance, (part.name, part.start, float(difference))
            if part.counted:
                seen = covered[part.name][part.box.slices]
                flat = seen.reshape(-1).clone()
                flat[part.start : part.stop] += 1
                seen.copy_(flat.view_as(seen))
    for name, count in covered.items():
        assert (count == 1).all(), name


def gradient_difference(case: Case, ranks: list[list[Part]]) -> float:
    """The largest, relative to the tensor's maximum."""
    gradients, _ = reference(case)
    return max(
        float((part.gradient - part.of(gradients[part.name])).abs().max() / gradients[part.name].abs().max())
        for parts in ranks
        for part in parts
    )


@dataclass(frozen=True)
class Measured:
    """What a rank holds after a step, by category in bytes, and what that step sent."""

    memory: dict[str, int]
    traffic: list[Traffic]


def measure(rank: int, world: int, case: Case) -> Measured:
    """The second step of a run. Gradients are still held; all that no category explains is under "other"."""
    with MemoryTracker() as tracker:
        placed, mesh = place(case, rank)
        run = steps(placed, mesh, case, 2)
        next(run)
        with CollectiveCounter(mesh.names) as counter:
            optimizer = next(run)
        tracker.mark((slice_.local for _, slice_ in placed.weights), "params")
        tracker.mark((piece.tensor.grad for piece in placed.gradients.pieces), "grads")
        for states in optimizer.state.values():
            tracker.mark((states["exp_avg"], states["exp_avg_sq"]), "optimizer")
            tracker.mark((states["step"],), "steps")
        del run
        gc.collect()
        return Measured(tracker.live(), counter.traffic())


def assert_memory(results: list[Measured], params: int, grads: int, states: int) -> None:
    """Bytes of each rank, and those of the optimizer of all ranks of a replica together."""
    for result in results:
        assert result.memory["params"] == params
        assert result.memory["grads"] == grads
        assert result.memory["other"] < 100  # scalars
    assert sum(result.memory["optimizer"] for result in results[:2]) == states
