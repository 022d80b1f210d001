"""A module of one's own in each layout, on real ranks, against a plain PyTorch loop on one process, in fp64."""

from __future__ import annotations

import pytest
from tests.ranks import run_ranks
from tests.train.library.small import BATCH, ROWS, Case, Result, assert_same, plain, train

from shoal.train.data.order import sample_index

WORLD_1 = [
    Case("gpt2", "dp=1,micro=2"),
    Case("gpt2", "dp=1,micro=2,recompute=full,offload=optimizer", clip=0.5),
    Case("vision", "dp=1", clip=0.05),
]
MEANS = Case("gpt2", "dp=2,micro=2", own="mean")
SHUFFLED = Case("gpt2", "fsdp=2", shuffle=True)
WORLD_2 = [
    Case("llama", "dp=2", clip=0.5),
    Case("llama", "fsdp=2,micro=2"),
    Case("gpt2", "fsdp=2,recompute=full", clip=0.5),
    Case("gpt2", "fsdp=2,zero=1,micro=1"),
    Case("llama", "fsdp=2,zero=2,micro=2,recompute=selective"),
    Case("vision", "fsdp=2,unit=2,micro=2", clip=0.05),
    Case("vision", "fsdp=2,zero=1"),
    Case("vision", "dp=2,micro=1"),
    Case("gpt2", "dp=2,micro=2", own="count"),
    Case("llama", "fsdp=2,micro=1", own="count", clip=0.5),
    Case("gpt2", "fsdp=2", wrap=2000),
    Case("llama", "fsdp=2", wrap=("model.embed_tokens", "LlamaMLP")),
    Case("batchnorm", "dp=2"),
    Case("batchnorm", "fsdp=2"),
    Case("llama", "tp=2,micro=4", clip=0.5),
    Case("qwen3", "tp=2,recompute=full"),
    Case("llama", "fsdp=2,micro=2,offload=optimizer:0.5", clip=0.5),
    Case("vision", "fsdp=2,zero=1,offload=optimizer", clip=0.05),
    Case("llama", "tp=2,micro=4,offload=optimizer"),
    Case("vision", "tp=2", plan=(("head", "colwise_gather_output"),)),
]
WORLD_4 = [
    Case("gpt2", "dp=2,fsdp=2,micro=1", clip=0.5),
    Case("llama", "dp=2,fsdp=2,zero=2"),
    Case("vision", "fsdp=4"),
    Case("llama", "dp=4"),
    Case("gpt2", "fsdp=4,zero=1", own="count"),
    Case("gpt2", "dp=2,fsdp=2,micro=1", own="count"),
    Case("qwen3", "fsdp=2,tp=2", clip=0.5),
    Case("llama", "fsdp=2,zero=1,tp=2,micro=2"),
]


def train_all(rank: int, world: int, cases: list[Case]) -> list[Result]:
    """One after the other in the same processes: to import transformers takes longer than to train."""
    return [train(rank, world, case) for case in cases]


def check(world: int, cases: list[Case]) -> None:
    for case, *results in zip(cases, *run_ranks(world, train_all, cases), strict=True):
        try:
            assert_same(results, plain(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("case", WORLD_1, ids=str)
def test_one_rank_equals_plain_pytorch(case: Case) -> None:
    assert_same([train(0, 1, case)], plain(case))


@pytest.mark.parametrize("half", [0, 1])
def test_two_ranks_equal_plain_pytorch(half: int) -> None:
    check(2, WORLD_2[half::2])


def test_four_ranks_equal_plain_pytorch() -> None:
    check(4, WORLD_4)


def test_what_weighs_and_what_comes_first() -> None:
    means, shuffled = (
        list(results) for results in zip(*run_ranks(2, train_all, [MEANS, SHUFFLED]), strict=True)
    )
    # Four micro-batches with different numbers of targets: a mean of means, which is another number.
    assert_same(means, plain(MEANS, parts=4))
    assert abs(means[0].losses[0] - plain(MEANS)[0][0]) > 1e-4

    def order(step: int) -> list[int]:
        return [sample_index(0, step * BATCH + place, ROWS) for place in range(BATCH)]

    # Shuffled rows are the same in every layout.
    assert_same(shuffled, plain(SHUFFLED, order=order))
