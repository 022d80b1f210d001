"""Compiled blocks: the numbers of eager ones, one graph for all layers, and kept is what ``facts`` lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.predict.sending import GPT2, NEOX, QWEN3
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from shoal.facts.config import TuneSection
from shoal.facts.layout import RECOMPUTES, Layout, Recompute
from shoal.facts.layout.kept import kept_tensors
from shoal.facts.model import Model
from shoal.models.decoder import build
from shoal.models.initial import fill
from shoal.models.rotary import tables
from shoal.parallel.apply import Placed, apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.stage_module import MicroBatch

ROWS, SEQ = 2, 16
# No two widths are alike, so that a size tells what has it.
SHAPE: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 24,
    "ffn": 112,
    "vocab": 61,
    "max_positions": 32,
    "init_std": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": QWEN3, "gpt2": GPT2, "neox": NEOX}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing compiled before; what torch counts begins anew."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def place(
    model: Model,
    backend: str | None,
    layout: str = "dp=1",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
) -> Placed:
    network = build(model, dropout, compute=compute or dtype, dtype=dtype)
    mesh = Mesh(Layout.parse(layout), 0, torch.device("cpu"))
    return apply(network, mesh, TuneSection(), partial(fill, model=model, seed=0), SEQ, compile_with=backend)


def rows(model: Model, count: int = ROWS, documents: bool = False, dropout: bool = False) -> MicroBatch:
    tokens = (torch.arange(SEQ) * 7 + torch.arange(count)[:, None] * 13) % model.vocab
    positions = torch.arange(SEQ).repeat(count, 1)
    return MicroBatch(
        tokens,
        positions,
        positions // 5 if documents else None,
        tokens.roll(-1, 1),
        torch.arange(count) + 5 if dropout else None,
    )


def step(placed: Placed, batches: list[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients."""
    placed.gradients.start_step()
    losses = placed.executor.forward_backward(batches, 1 / (ROWS * SEQ))
    placed.gradients.finish_step()
    gradients = [piece.tensor.grad for piece in placed.gradients.pieces]
    return losses, [one.clone() for one in gradients if one is not None]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected) > 0
    largest = max(float(one.abs().max()) for one in expected)
    for ours, theirs in zip(found, expected, strict=True):
        # A gradient that is nothing but rounding is measured against the others.
        scale = max(float(theirs.abs().max()), 1e-3 * largest)
        assert float((ours - theirs).abs().max()) <= tolerance * scale


def compiled(placed: Placed) -> None:
    """That it was, and not fallen back."""
    assert placed.compiled is not None and placed.compiled.problem is None


def test_inductor_computes_what_eager_blocks_do() -> None:
    """The compiler that is used, once, with all that a block may have in it."""
    model = Model(**{**SHAPE, **QWEN3})
    batches = [rows(model, documents=True, dropout=True)]
    expected = step(place(model, None, dropout=0.1), batches)
    placed = place(model, "inductor", dropout=0.1)
    found = step(placed, batches)
    compiled(placed)
    assert counters["stats"]["unique_graphs"] == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_compiled_block_keeps_and_computes(family: str) -> None:
    """In every kind of recomputation. The partitioner is the one of torch's own compiler; only kernels are eager."""
    model = Model(**{**SHAPE, **FAMILIES[family]})
    batches = [rows(model, dropout=True)]
    expected = step(place(model, None, dropout=0.1), batches)
    for kind in RECOMPUTES:
        placed = place(model, "aot_eager", f"recompute={kind}", dropout=0.1)
        found = step(placed, batches)
        compiled(placed)
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, 1e-6)
        assert saved(placed, batches[0]) == listed(model, kind, 4), kind


def saved(placed: Placed, batch: MicroBatch) -> list[int]:
    """Bytes of what one block keeps beside weights and what all layers share, the smallest first."""
    (segment,) = placed.segments
    decoder = segment.network.model
    hidden = decoder.embed(batch.tokens, batch.positions, batch.noise).detach().requires_grad_()
    turned = decoder.shape.positions == "rotary"
    rotation = tables(decoder.shape, None, batch.positions, decoder.compute) if turned else None
    shared = [*decoder.layers["0"].parameters(), batch.positions, *(rotation or ())]
    shared += [one for one in (batch.noise, batch.documents) if one is not None]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = decoder.layers["0"](hidden, rotation, batch.positions, batch.documents, batch.noise)
    assert output.requires_grad
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}
    # To torch attention may be random. Where it is repeated, the generator's state is kept: some bytes, of no token.
    state = torch.get_rng_state().nbytes
    return sorted(size for address, size in kept.items() if address not in known and size != state)


def listed(model: Model, kind: Recompute, compute: int) -> list[int]:
    return sorted(ROWS * SEQ * one.bytes for one in kept_tensors(model, kind, compute))
