"""What replicas of shards have summed in another precision is let go, two units later, and nothing else changes."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.parallel.sharding import Case, Part, batches, place, steps, train
from tests.ranks import run_ranks
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shoal.parallel.replica_sums import ReplicaSums

CASE = Case(
    "dp=2,fsdp=2",
    {"layers": 6},
    dtype=torch.bfloat16,
    compute=torch.bfloat16,
    reduce_dtype=torch.float32,
    micro_batches=2,
)
UNITS = 6 + 2  # blocks, embedding, head


class Sums:
    """Stands in for the hook: sees every sum, and hands it on if there is anything to hand it on to."""

    def __init__(self, landing: ReplicaSums | None) -> None:
        self.landing = landing
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive: list[int] = []  # when a sum is done, how many there are

    def __call__(self, buffer: Tensor) -> None:
        assert buffer.dtype == torch.float32
        self.seen.append(weakref.ref(buffer.untyped_storage()))
        if self.landing is not None:
            self.landing(buffer)
        storages = [one() for one in self.seen]
        self.alive.append(sum(storage is not None and storage.nbytes() > 0 for storage in storages))


def modules(placed: Any) -> list[FSDPModule]:
    segments = placed.gradients.roots.values()
    return [one for segment in segments for one in segment.modules() if isinstance(one, FSDPModule)]


def watched(rank: int, world: int, lets_go: bool) -> list[int]:
    placed, mesh = place(CASE, rank)
    sums = Sums(placed.gradients.landing if lets_go else None)
    for module in modules(placed):
        module.set_all_reduce_hook(sums)
    next(steps(placed, mesh, CASE, 1))
    return sums.alive


def kept(rank: int, world: int, case: Case) -> list[Part]:
    """As ``train``, with every sum kept as FSDP keeps it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaSums, "__call__", lambda *_: None)
        return train(rank, world, case)


def hooked(rank: int, world: int, case: Case) -> bool:
    placed, mesh = place(case, rank)
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaSums, "__call__", lambda _, buffer: seen.append(buffer))
        placed.gradients.start_step()
        placed.executor.forward_backward(batches(case, mesh), 1.0)
    return bool(seen)


def test_the_sums_of_two_units_are_alive_at_once() -> None:
    """FSDP alone would keep all of them to the end of the pass."""
    for alive in run_ranks(4, watched, True):
        assert alive == [1, *[2] * (UNITS - 1)]
    for alive in run_ranks(4, watched, False):
        assert alive == list(range(1, UNITS + 1))


def test_gradients_are_those_of_sums_that_are_kept() -> None:
    for found, expected in zip(run_ranks(4, train, CASE), run_ranks(4, kept, CASE), strict=True):
        assert [part.name for part in found] == [part.name for part in expected]
        for one, other in zip(found, expected, strict=True):
            # Of the embedding a rank may hold rows alone whose tokens do not occur.
            assert one.gradient.dtype == torch.bfloat16
            assert one.gradient.any() or "embed_tokens" in one.name
            assert torch.equal(one.gradient, other.gradient) and torch.equal(one.value, other.value), one.name


@pytest.mark.parametrize("states", [torch.bfloat16, torch.float32])
def test_only_what_is_cast_is_let_go(states: torch.dtype) -> None:
    """Where a sum stays as the gradient itself, its storage is the gradient's."""
    case = replace(CASE, dtype=states)
    assert run_ranks(4, hooked, case) == [states == torch.bfloat16] * 4
