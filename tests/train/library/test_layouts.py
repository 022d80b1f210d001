"""A module of one's own in each layout, on real ranks, against a plain PyTorch loop on one process, in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.train.library.small import (
    BATCH,
    ROWS,
    Case,
    Result,
    assert_same,
    build,
    optimizer_of,
    plain,
    rows,
    train,
)
from torch import Tensor
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import shoal
from shoal.facts.problem import BadInput
from shoal.train.data.order import sample_index

GPT2_STAGES = (
    ("transformer.wte", "first"),
    ("transformer.wpe", "first"),
    ("transformer.h", "blocks"),
    ("transformer.ln_f", "last"),
    ("lm_head", "last"),
)
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
    Case("mixtral", "tp=2,micro=4,recompute=full", clip=0.5),
    Case("llama", "fsdp=2,micro=2,offload=optimizer:0.5", clip=0.5),
    Case("vision", "fsdp=2,zero=1,offload=optimizer", clip=0.05),
    Case("llama", "tp=2,micro=4,offload=optimizer"),
    Case("vision", "tp=2", plan=(("head", "colwise_gather_output"),)),
    Case("llama", "pp=2", clip=0.5),
    Case("qwen3", "pp=2,micro=2,recompute=full"),
    Case("gpt2", "pp=2,schedule=gpipe,micro=4,offload=optimizer", plan=GPT2_STAGES),
]
WORLD_4 = [
    Case("gpt2", "dp=2,fsdp=2,micro=1", clip=0.5),
    Case("llama", "dp=2,fsdp=2,zero=2"),
    Case("vision", "fsdp=4"),
    Case("llama", "dp=4"),
    Case("gpt2", "fsdp=4,zero=1", own="count"),
    Case("gpt2", "dp=2,fsdp=2,micro=1", own="count"),
    Case("qwen3", "fsdp=2,tp=2", clip=0.5),
    Case("mixtral", "fsdp=2,tp=2", clip=0.5),
    Case("llama", "fsdp=2,zero=1,tp=2,micro=2"),
    Case("llama", "dp=2,pp=2"),
    Case("qwen3", "fsdp=2,pp=2,micro=2", clip=0.5),
    Case("qwen3", "fsdp=2,zero=1,pp=2"),
    Case("qwen3", "tp=2,pp=2,micro=2"),
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


def use_stages(rank: int, world: int) -> list[Any]:
    """What a script may do with its part of a model, and what it may not."""
    found: list[Any] = []
    with shoal.run("pp=2,micro=2", batch=BATCH) as run:
        model: Any = build("llama")
        model, _, _ = run.prepare(model, optimizer_of(model), rows("llama"))
        held = {name for name, one in model.named_parameters() if not one.is_meta}
        batch = torch.utils.data.default_collate(rows("llama")[:BATCH])
        found += [held, run.evaluate(model, batch)]
        with pytest.raises(BadInput, match=r"run\.evaluate"):
            model(**batch)
        with pytest.raises(BadInput, match=r"run\.step\(model, batch, loss=fn\)"):
            run.backward(torch.zeros(()))

        def own(model: Any, batch: Any) -> tuple[Tensor, int]:
            count = int((batch["labels"][:, 1:] != -100).sum())
            return model(**batch).loss * count, count

        found.append(float(run.step(model, batch, loss=own)))
    with shoal.run("fsdp=2,micro=2", batch=BATCH) as run:
        model = build("llama")
        model, _ = run.prepare(model, optimizer_of(model))
        half = torch.utils.data.default_collate(rows("llama")[4 * rank : 4 * rank + 4])
        found += [run.evaluate(model, half), float(run.step(model, half))]
    return found


def test_a_script_with_stages() -> None:
    (first, *losses), (last, *others) = run_ranks(2, use_stages)
    model: Any = build("llama")
    batch = torch.utils.data.default_collate(rows("llama")[:BATCH])
    assert losses == others == pytest.approx([float(model(**batch).loss.detach())] * 4, abs=1e-12)
    # Each has its own part alone.
    assert first | last == dict(model.named_parameters()).keys() and not first & last
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in last


def losses_of_experts(rank: int, world: int, way: str) -> list[float]:
    """``grouped``: experts as transformers computes them where it is not told how; these products take no fp64.
    ``first two``: no token ever goes to the others.
    """
    with shoal.run(f"tp={world}" if world > 1 else "dp=1", batch=BATCH) as run:
        model: Any = build("mixtral", exact=False)
        if way == "grouped":
            model.float().set_experts_implementation("grouped_mm")
        for one in model.modules():
            if way == "first two" and isinstance(one, MixtralTopKRouter):
                one.forward = partial(first_two, one)
        model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), rows("mixtral"))
        return [float(run.step(model, batch)) for batch in run.steps(loader)]


def first_two(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    return logits, logits[:, :2].softmax(-1), torch.arange(2).expand(len(logits), 2)


@pytest.mark.parametrize("way", ["grouped", "first two"])
def test_experts_of_two_ranks(way: str) -> None:
    alone = losses_of_experts(0, 1, way)
    assert alone[0] != alone[-1]
    for losses in run_ranks(2, losses_of_experts, way):
        assert losses == pytest.approx(alone, abs=1e-5)
