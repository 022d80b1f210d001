"""Memory of compiled blocks: what rests is the list in ``facts``, and every kind of recomputation keeps less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.predict.counted import ask

from shoal.facts.layout import RECOMPUTES
from shoal.facts.layout.saved_activations import kept_tensors
from shoal.predict.memory import ledger
from shoal.predict.memory.micro_batch import micro_batch_bytes
from shoal.predict.workload import Workload


def resting(workload: Workload) -> float:
    (block,) = micro_batch_bytes(workload).blocks.values()
    return block.resting


@pytest.mark.parametrize("layout", ["dp=1", "tp=2", "tp=2,sp=0"])
def test_what_rests_is_what_facts_list(layout: str) -> None:
    for kind in RECOMPUTES:
        workload = replace(ask(f"{layout},recompute={kind}", precision="bf16"), compile=True)
        given = workload.layout
        listed = kept_tensors(workload.model, kind, 2, given.tp, given.sp)
        local = workload.tokens / given.tp if given.sp and given.tp > 1 else workload.tokens
        assert resting(workload) == sum(
            one.bytes * (local if one.of_stream else workload.tokens) for one in listed
        )


def test_a_token_of_the_1b_shape() -> None:
    """By hand, bf16: input, q, k, v, attention's result, ln Σ exp, o_proj's result, gate, up."""
    shape = {"hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192}
    workload = replace(ask("dp=1", shape, precision="bf16"), compile=True)
    by_hand = 2 * (2048 + 2048 + 512 + 512 + 2048 + 2048 + 8192 + 8192) + 4 * 32
    assert resting(workload) == by_hand * workload.tokens


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_hold_less_than_eager_ones(precision: str) -> None:
    for layout in ("dp=1", "fsdp=2", "pp=2,micro=1", "tp=2"):
        eager = ask(layout, {"layers": 4}, precision=precision)
        peaks = [
            ledger(replace(eager, compile=True, layout=eager.layout.replace(recompute=kind))).peak_allocated
            for kind in RECOMPUTES
        ]
        assert peaks[0] < ledger(eager).peak_allocated, layout
        assert peaks[0] > peaks[1] > peaks[2], layout
