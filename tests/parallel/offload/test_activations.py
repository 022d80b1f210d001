"""Activations that wait in the host's memory: real ranks against one process."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from tests.parallel.sharding import GPT2, Case, assert_equal, train
from tests.parallel.test_compile import ROWS, SEQ, SHAPE, assert_close, place, rows, step
from tests.ranks import run_ranks
from tests.thinned import thinned
from torch import Tensor

from shoal.facts.layout import Layout, Recompute
from shoal.facts.layout.saved_activations import kept_tensors
from shoal.facts.model import Model
from shoal.parallel.offload.activations import OffloadedTensor

ALONE = [
    Case("recompute=full,offload=activations", micro_batches=1),
    Case("recompute=selective,offload=activations:0.5"),
    Case("recompute=selective,offload=activations", GPT2),
]
WORLD_2 = [
    Case("fsdp=2,recompute=full,offload=activations:0.5"),
    Case("dp=2,recompute=full,offload=activations"),
    Case("fsdp=2,recompute=selective,offload=activations", {"tied": True}),
    Case("fsdp=2,zero=2,recompute=selective,offload=activations"),
    Case("tp=2,recompute=full,offload=activations"),
    Case("tp=2,sp=0,recompute=selective,offload=activations"),
    Case("pp=2,recompute=full,offload=activations", micro_batches=4),
    Case("pp=2,schedule=zb,recompute=selective,offload=activations", micro_batches=4),
    Case("pp=2,schedule=zbv,recompute=full,offload=activations", micro_batches=4),
]


@pytest.mark.parametrize("case", thinned([*ALONE, *WORLD_2], 2), ids=lambda case: case.layout)
def test_a_layout_equals_one_process(case: Case) -> None:
    assert_equal(case, run_ranks(Layout.parse(case.layout).world, train, case))


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_compiled_blocks_send_away_what_they_keep_and_no_weights(kind: Recompute) -> None:
    torch.compiler.reset()
    model = Model(**{**SHAPE, "layers": 4})
    batches = [rows(model)] * 2
    expected = step(place(model, None), batches)
    placed = place(model, "aot_eager", f"recompute={kind},offload=activations")
    losses, gradients = step(placed, batches)
    assert placed.compiled is not None and placed.compiled.problem is None
    assert_close(losses, expected[0], 1e-6)
    assert_close(gradients, expected[1], 1e-4)
    kept = sum(one.bytes for one in kept_tensors(model, kind, 4))
    # All blocks but the last, whose backward pass comes at once.
    assert placed.host.bytes == 3 * kept * ROWS * SEQ
    step(placed, batches)
    assert placed.host.bytes == 3 * kept * ROWS * SEQ, "buffers are used again"


def test_what_no_backward_pass_asks_for_gives_its_buffers_back() -> None:
    model = Model(**{**SHAPE, "layers": 4})
    placed = place(model, None, "recompute=selective,offload=activations")
    step(placed, [rows(model)])
    once = placed.host.bytes
    for _ in range(3):
        output = placed.segments[0](rows(model).tokens, rows(model))
        del output
    assert placed.host.bytes == once
    step(placed, [rows(model)])
    assert placed.host.bytes == once > 0


def test_the_backward_pass_of_a_block_asks_for_the_one_before_it() -> None:
    """Nothing else is back on the device by then, and nothing is asked for twice."""
    model = Model(**{**SHAPE, "layers": 6})
    placed = place(model, None, "recompute=full,offload=activations")
    asked: list[int] = []
    ask_back = OffloadedTensor.ask_back

    def noted(away: OffloadedTensor) -> None:
        if away._buffer is not None:
            asked.append(away._buffer.bytes.data_ptr())
        ask_back(away)

    layers = placed.segments[0].network.model.layers
    seen: dict[str, int] = {}

    def note(name: str, gradient: Tensor) -> None:
        seen[name] = len(asked)

    for name, block in layers.items():
        block.self_attn.q_proj.weight.register_post_accumulate_grad_hook(partial(note, name))
    with patch.object(OffloadedTensor, "ask_back", noted):
        step(placed, [rows(model)])
    assert seen == {"5": 1, "4": 2, "3": 3, "2": 4, "1": 5, "0": 5}
    assert len(set(asked)) == 5
