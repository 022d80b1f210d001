"""Gradients add up in the recipe's ``reduce`` precision, whatever they are computed in, in every layout.

Each sequence is a micro-batch of its own, so that every layout computes the same bf16 gradients and differs only in how
it adds them up: in fp32 they agree to 1e-6, in bf16 they would be off by 1e-3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.parallel.sharding import ROWS, SEQ, Case, Part, batches, place
from tests.ranks import run_ranks
from tests.thinned import thinned
from torch import Tensor

from shoal.facts import logits
from shoal.facts.layout import Layout
from shoal.observe.collectives import CollectiveCounter

# A sum of eight parts in fp32, in any order; one rounding to bf16 is 2e-3.
TOLERANCE = 2e-6
TIED = {"tied": True}


def case_of(layout: str, changes: dict | None = None) -> Case:
    """Every sequence is a micro-batch."""
    parsed = Layout.parse(layout)
    each = ROWS // (parsed.dp * parsed.fsdp)
    return Case(layout, changes or {}, dtype=torch.float32, compute=torch.bfloat16, micro_batches=each)


def gradients(rank: int, world: int, case: Case, at_once: int) -> tuple[list[Part], set[str], set[str]]:
    """The pieces' gradients; the types that gradients add up in before any rank has spoken; and those of the sums."""
    logits.LOGITS_AT_ONCE = at_once
    placed, mesh = place(case, rank)
    held = placed.gradients
    held.start_step()
    with CollectiveCounter(mesh.names, log=True) as counter:
        placed.executor.forward_backward(batches(case, mesh), 1 / (ROWS * SEQ))
        here = {name_of(one.grad) for one in held.computed_with() if one.grad is not None}
        held.finish_step()
        sums = {call.dtype for call in counter.calls if call.group in ("dp", "fsdp") and "reduce" in call.op}
        counter.reset()
        placed.shared.sum(held.pieces)
        sums |= {call.dtype for call in counter.calls}
    parts = [
        Part(one.name, one.box, one.start, one.stop, one.counted, one.tensor.grad.reshape(-1), one.tensor)
        for one in held.pieces
        if one.tensor.grad is not None
    ]
    here |= {name_of(part.gradient) for part in parts}
    return [replace(part, value=part.gradient) for part in parts], here, sums


def name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@cache
def alone(changes: tuple, at_once: int) -> dict[str, Tensor]:
    """One process that adds up in fp32, one sequence after the other."""
    ((parts, _, _),) = run_ranks(1, gradients, case_of("dp=1", dict(changes)), at_once)
    return {part.name: part.gradient.view(part.box.whole) for part in parts}


def check(layout: str, changes: dict, at_once: int = 2**27) -> None:
    expected = alone(tuple(sorted(changes.items())), at_once)
    results = run_ranks(Layout.parse(layout).world, gradients, case_of(layout, changes), at_once)
    for parts, here, sums in results:
        assert here == {"float32"} and sums <= {"float32"}
        for part in parts:
            whole = expected[part.name]
            off = float((part.gradient - part.of(whole)).abs().max() / whole.abs().max())
            assert off < TOLERANCE, (part.name, off)


@pytest.mark.parametrize(
    "layout",
    thinned(
        [
            "dp=2",
            "fsdp=2,zero=1",
            "fsdp=2,zero=2",
            "fsdp=2",
            "dp=2,fsdp=2",
            "dp=2,fsdp=2,zero=2",
            "pp=2,schedule=zb",
            "fsdp=2,pp=2",
            "fsdp=2,pp=2,schedule=gpipe,unit=2",
            "fsdp=2,pp=2,schedule=interleaved",
            "fsdp=2,pp=2,schedule=zb",
            "fsdp=2,pp=2,schedule=zbv",
            "fsdp=2,pp=2,schedule=dualpipev",
            "fsdp=2,zero=1,pp=2,schedule=zbv",
            "fsdp=2,zero=2,pp=2,schedule=zb",
        ],
        2,
    ),
)
def test_micro_batches_add_up_in_fp32(layout: str) -> None:
    check(layout, {})


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("dp=2", {}),
        ("fsdp=2,zero=1", {}),
        ("dp=2,fsdp=2,zero=2", {}),
        ("dp=2,fsdp=2", {}),
        ("tp=2", {}),  # norms
        ("tp=2,sp=0", {"kv_heads": 1}),  # a key/value head that both have
        ("pp=2", TIED),  # both ends' embeddings
    ],
)
def test_ranks_sum_bf16_gradients_in_fp32(layout: str, changes: dict) -> None:
    """With weights at rest, and so gradients, of bf16."""
    case = replace(case_of(layout, changes), dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for _, here, sums in run_ranks(Layout.parse(layout).world, gradients, case, 2**27):
        assert here == {"bfloat16"} and sums == {"float32"}
