"""What the allocator grants beyond tensors, against an allocator of the same rules and against GPUs."""

from __future__ import annotations

import math

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.memory.allocator_rounding import MIB, allocated_size, allocator_remainders
from shoal.predict.memory.inventory import rank_inventories
from shoal.predict.workload import Workload


class Allocator:
    """Torch's, from nothing: what is left of a block of more than 1 MiB is the next one's that fits."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.allocated = 0

    def take(self, size: int) -> None:
        found = min((block for block in self.free if block >= size), default=None)
        if found is None:
            found = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        else:
            self.free.remove(found)
        if found - size > MIB:
            self.free.append(found - size)
            found = size
        self.allocated += found


@pytest.mark.parametrize(
    "size", [3 * MIB, 5_120_000, 10_240_000, 20_480_000, 40_960_000, 64 * MIB, 321_644_800]
)
def test_a_tensor_takes_what_an_allocator_gives_it(size: int) -> None:
    allocator = Allocator()
    for _ in range(120):
        allocator.take(size)
    assert allocated_size(size) * 120 == pytest.approx(allocator.allocated, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama3-8b", "qwen2-7b", "pythia-6.9b"])
def test_weights_and_states_of_one_rank(name: str) -> None:
    model, recipe = PRESETS[name], Recipe(precision="bf16", optimizer="adamw", seq=128, batch=1)
    workload = Workload(model, find("1xH200"), recipe, Layout.parse("micro=1"))
    (rank,) = rank_inventories(workload)
    allocator, asked = Allocator(), 0
    for width in (2, 4, 4, 4):  # weights, their master copies, two moments
        for parameter in llama_parameters(model):
            size = width * math.prod(parameter.shape)
            if size > MIB:
                allocator.take(size)
                asked += size
    # A piece of a segment that is left may go to another tensor.
    assert allocator_remainders(rank) == pytest.approx(allocator.allocated - asked, rel=0.15, abs=8 * MIB)


def test_shapes_of_powers_of_two_lose_nothing_and_a_cpu_never() -> None:
    recipe = Recipe(precision="bf16", optimizer="adamw", seq=128, batch=1)
    for cluster, most in (("1xH200", 0.0005), ("local", 0.0)):
        workload = Workload(PRESETS["llama3.2-1b"], find(cluster), recipe, Layout.parse("micro=1"))
        (rank,) = rank_inventories(workload)
        assert allocator_remainders(rank) <= most * 16 * rank.total.whole
