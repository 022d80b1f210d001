"""Weights that rest in the host's memory: real ranks against one process, and what is on the device when."""

from __future__ import annotations

import pytest
import torch
from tests.parallel.sharding import GPT2, Case, assert_equal, place, train
from tests.parallel.test_compile import ROWS, SEQ, SHAPE, assert_close, rows
from tests.parallel.test_compile import place as compiled
from tests.ranks import run_ranks
from tests.thinned import thinned
from torch import Tensor, nn

from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.parallel.placed import Placed
from shoal.parallel.shards import gradient
from shoal.parallel.stage_module import MicroBatch, local_tensor

ALONE = [
    Case("offload=params", micro_batches=1),
    Case("offload=params", {"tied": True}),
    Case("offload=params:0.5", GPT2, micro_batches=4),
    Case("recompute=full,offload=optimizer+params:0.4"),
    Case("recompute=selective,offload=activations+params"),
]
WORLD_2 = [
    Case("dp=2,offload=params"),
    Case("fsdp=2,offload=params"),
    Case("fsdp=2,recompute=full,offload=params:0.5", {"tied": True}),
    Case("fsdp=2,zero=2,offload=params"),
    Case("fsdp=2,zero=2,offload=params:0.4", {"tied": True}, micro_batches=4),
    Case("fsdp=2,zero=1,offload=optimizer+params:0.6"),
    Case("tp=2,offload=params"),
    Case("tp=2,sp=0,recompute=selective,offload=params:0.5", {"tied": True}),
    Case("pp=2,offload=params", {"tied": True}, micro_batches=4),
    Case("pp=2,schedule=zbv,offload=params:0.5", micro_batches=4),
]
WORLD_4 = [
    Case("fsdp=2,zero=2,tp=2,offload=params"),
    Case("dp=2,fsdp=2,offload=params"),
    Case("fsdp=2,pp=2,offload=params", micro_batches=2),
]


@pytest.mark.parametrize("case", thinned([*ALONE, *WORLD_2, *WORLD_4], 2), ids=lambda case: case.layout)
def test_a_layout_equals_one_process(case: Case) -> None:
    assert_equal(case, run_ranks(Layout.parse(case.layout).world, train, case))


def _step(placed: Placed, batches: list[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
    placed.start_step(len(batches))
    losses = placed.executor.forward_backward(batches, 1 / (ROWS * SEQ))
    placed.finish_step(ROWS)
    return losses, [gradient(piece) for piece in placed.gradients.pieces]


def _there(placed: Placed) -> set[str]:
    """Names of modules with weights on the device, up to a block's."""
    named = [one for segment in placed.segments for one in segment.network.named_parameters()]
    held = (name for name, weight in named if local_tensor(weight).untyped_storage().nbytes())
    return {".".join(name.split(".")[:3]) if ".layers." in name else name for name in held}


def test_a_block_and_the_next_one_are_on_the_device() -> None:
    """In both passes; at the head, the last block. Between steps nothing is."""
    model = Model(**{**SHAPE, "layers": 4})
    placed = compiled(model, None, "offload=params")
    assert _there(placed) == set()
    forward: dict[str, set[str]] = {}
    backward: dict[str, set[str]] = {}

    def note(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda *_: forward.update({name: _there(placed)}))

    network = placed.segments[0].network
    for name, block in network.model.layers.items():
        note(name, block)
        weight = block.self_attn.q_proj.weight
        weight.register_hook(lambda gradient, name=name: backward.update({name: _there(placed)}))
    note("embed", network.model.embed_tokens)
    note("norm", network.model.norm)
    _step(placed, [rows(model)])
    layer = "model.layers.{}".format
    ends = {"model.norm.weight", "lm_head.weight"}
    assert forward == {
        "embed": {"model.embed_tokens.weight", layer(0)},
        **{str(one): {layer(one), layer(one + 1)} for one in range(3)},
        "3": {layer(3), *ends},
        "norm": {layer(3), *ends},
    }
    assert backward == {"0": {layer(0)}, **{str(one): {layer(one), layer(one - 1)} for one in (1, 2, 3)}}
    assert _there(placed) == set()


def test_of_a_fraction_the_last_weights_rest_away() -> None:
    model = Model(**{**SHAPE, "layers": 4})
    placed = compiled(model, None, "offload=params:0.5")
    there = _there(placed)
    assert "model.embed_tokens.weight" in there and "model.layers.0" in there
    assert not there & {"model.layers.3", "lm_head.weight", "model.norm.weight"}


def test_fsdp_holds_no_rows_between_steps() -> None:
    run_ranks(2, _no_rows)


def _no_rows(rank: int, world: int) -> None:
    placed, _ = place(Case("fsdp=2,offload=params"), rank)
    assert _there(placed) == set()
    away = placed.host.bytes
    assert away == sum(piece.tensor.nbytes for piece in placed.gradients.pieces)


def test_compiled_blocks_fetch_too() -> None:
    torch.compiler.reset()
    model = Model(**{**SHAPE, "layers": 4})
    batches = [rows(model)] * 2
    expected = _step(compiled(model, None), batches)
    for layout in ("offload=params", "recompute=full,offload=params"):
        placed = compiled(model, "aot_eager", layout)
        losses, gradients = _step(placed, batches)
        assert placed.compiled is not None and placed.compiled.problem is None
        assert_close(losses, expected[0], 1e-6)
        assert_close(gradients, expected[1], 1e-4)
