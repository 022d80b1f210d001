"""Compiled blocks: the numbers of eager ones, one graph for all layers, and kept is what ``facts`` lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.predict.sending import GEMMA2, GEMMA3, GPT2, NEOX, QWEN3
from tests.thinned import thinned
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from shoal.facts.cluster.stack import SHOAL
from shoal.facts.config import TuneSection
from shoal.facts.layout import RECOMPUTES, Layout, Recompute
from shoal.facts.layout.saved_activations import kept_tensors
from shoal.facts.model import Adapters, Experts, Model
from shoal.models.attention import attend
from shoal.models.decoder import build
from shoal.models.documents import Documents
from shoal.models.initial import fill
from shoal.models.lora import add_adapters
from shoal.models.rotary import tables
from shoal.observe.memory import MemoryTracker
from shoal.parallel.apply import apply
from shoal.parallel.deferred import Deferred
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.parallel.stage_module import MicroBatch
from shoal.predict.memory.activations import block_activations
from shoal.predict.memory.block_workload import BlockWorkload

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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "neox": NEOX,
}


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
    if model.adapters is not None:
        add_adapters(network, model.adapters)
    mesh = Mesh(Layout.parse(layout), 0, torch.device("cpu"))
    return apply(network, mesh, TuneSection(), partial(fill, model=model, seed=0), SEQ, compile_with=backend)


def rows(model: Model, count: int = ROWS, documents: bool = False, dropout: bool = False) -> MicroBatch:
    tokens = (torch.arange(SEQ) * 7 + torch.arange(count)[:, None] * 13) % model.vocab
    positions = torch.arange(SEQ).repeat(count, 1)
    return MicroBatch(
        tokens,
        positions,
        Documents.of(positions // 5) if documents else None,
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


def test_layers_share_graphs_but_for_their_windows() -> None:
    """And texts that grow token by token, or an evaluation's last rows, are not compiled at all."""
    model = Model(**{**SHAPE, "layers": 4, "window": 5, "window_layers": (1, 3)})
    placed = place(model, "aot_eager")
    step(placed, [rows(model)])
    compiled(placed)
    assert counters["stats"]["unique_graphs"] == 2
    placed.executor.forward_only([rows(model)])
    assert counters["stats"]["unique_graphs"] == 4
    placed.executor.forward_only([rows(model, count=1)])
    for length in range(3, 8):
        written = rows(model, count=1)
        text = MicroBatch(written.tokens[:, :length], written.positions[:, :length], None, None, None)
        placed.executor.scores(text, length - 1)
    step(placed, [rows(model)])
    # Who wants to see every operator sees an eager step, and afterwards all is as before.
    with MemoryTracker():
        step(placed, [rows(model)])
    step(placed, [rows(model)])
    compiled(placed)
    assert counters["stats"]["unique_graphs"] == 4


def test_an_evaluation_in_the_midst_of_training_is_compiled_too() -> None:
    """Weights are narrower than the gradients that they then have, and keep."""
    model = Model(**SHAPE)
    placed = place(model, "aot_eager", compute=torch.bfloat16)
    step(placed, [rows(model)])
    held = [parameter.grad for parameter in placed.gradients.computed_with()]
    assert any(one is not None and one.dtype == torch.float32 for one in held)
    graphs = counters["stats"]["unique_graphs"]
    placed.executor.forward_only([rows(model)])
    compiled(placed)
    assert counters["stats"]["unique_graphs"] == graphs + 1
    assert all(
        a is b for a, b in zip((one.grad for one in placed.gradients.computed_with()), held, strict=True)
    )


@pytest.mark.parametrize("kind", thinned(["full", "none"], 2))
def test_adapters_drop_the_same_compiled(kind: str) -> None:
    adapters = Adapters(rank=4, alpha=8, targets=("q_proj", "o_proj", "down_proj"), dropout=0.3)
    model = Model(**SHAPE, adapters=adapters)

    def placed(backend: str | None) -> Placed:
        found = place(model, backend, f"recompute={kind}")
        for piece in found.gradients.pieces:  # B begins at zero, and A would have no gradient
            piece.tensor.data.copy_(torch.linspace(-1, 1, piece.tensor.numel()).view_as(piece.tensor))
        return found

    expected, undropped = (step(placed(None), [rows(model, dropout=one)]) for one in (True, False))
    assert not any(map(torch.allclose, undropped[1], expected[1]))
    ours = placed("aot_eager")
    found = step(ours, [rows(model, dropout=True)])
    compiled(ours)
    for some, theirs in zip(found, expected, strict=True):
        assert_close(some, theirs, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "full"])
def test_adapters_beside_experts_of_four_bits_are_compiled(kind: Recompute) -> None:
    torch.compiler.reset()
    adapters = Adapters(rank=4, alpha=8.0, targets=("q_proj", "o_proj"), base="nf4")
    wide = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64, "layers": 2}
    experts = {"family": "qwen3_moe", "qk_norm": True, "experts": Experts(count=4, active=2, ffn=64)}
    model = Model(**{**SHAPE, **wide, **experts, "adapters": adapters})

    def placed(backend: str | None) -> Placed:
        found = place(model, backend, f"recompute={kind}", compute=torch.bfloat16)
        for piece in found.gradients.pieces:
            piece.tensor.data.copy_(torch.linspace(-1, 1, piece.tensor.numel()).view_as(piece.tensor))
        return found

    expected = step(placed(None), [rows(model)])
    ours = placed("aot_eager")
    found = step(ours, [rows(model)])
    compiled(ours)
    for some, theirs in zip(found, expected, strict=True):
        assert_close(some, theirs, 3e-2)


def test_what_cannot_be_compiled_runs_eager() -> None:
    model = Model(**SHAPE)
    expected = step(place(model, None), [rows(model)])
    placed = place(model, "aot_eager")
    for segment in placed.segments:
        for block in segment.network.model.layers.values():
            block.self_attn.attend = untraceable
    losses, gradients = step(placed, [rows(model)])
    assert placed.compiled is not None and placed.compiled.problem is not None
    assert "\n" not in placed.compiled.problem
    assert torch.equal(losses[0], expected[0][0])
    assert all(map(torch.equal, gradients, expected[1]))


def untraceable(*arguments: Any, **named: Any) -> Tensor:
    torch._dynamo.graph_break()
    return attend(*arguments, **named)


@dataclass(frozen=True)
class Kept:
    family: str
    kinds: tuple[Recompute, ...] = ("none",)
    compute: torch.dtype = torch.float32


@pytest.mark.parametrize(
    "case",
    thinned(
        [
            Kept("llama", RECOMPUTES),
            Kept("gemma2", RECOMPUTES),
            Kept("gpt2"),
            Kept("gemma3", ("selective",), torch.bfloat16),
            Kept("qwen3", compute=torch.bfloat16),
            Kept("neox", ("selective",)),
        ],
        2,
    ),
    ids=lambda case: case.family,
)
def test_what_a_compiled_block_keeps_and_computes(case: Kept) -> None:
    """The partitioner is the one of torch's own compiler; only kernels are eager. Weights rest in fp32."""
    model = Model(**{**SHAPE, **FAMILIES[case.family]})
    batches = [rows(model, dropout=True)]
    expected = step(place(model, None, dropout=0.1, compute=case.compute), batches)
    for kind in case.kinds:
        placed = place(model, "aot_eager", f"recompute={kind}", dropout=0.1, compute=case.compute)
        found = step(placed, batches)
        compiled(placed)
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, 1e-6 if case.compute == torch.float32 else 0.05)
        assert saved(placed, batches[0]) == listed(model, kind, case.compute.itemsize), kind


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_split_backward_pass_leaves_what_the_ledger_says(recompute: Recompute) -> None:
    """Each projection's input and output gradient, and no copy of what several projections read."""
    model = Model(**SHAPE)
    placed = place(model, "aot_eager", f"recompute={recompute}")
    placed.compiled.deferred = deferred = Deferred()
    expected = step(place(model, None), [rows(model)])[1]
    deferred.begin(0, 0)
    left = step(placed, [rows(model)])[1]
    compiled(placed)
    waiting = deferred.heaps[0, 0]
    assert len(waiting) == 7 * model.layers and len(left) < len(expected)
    held = {
        one.untyped_storage().data_ptr(): one.nbytes for each in waiting for one in (each.x, each.gradient)
    }
    work = BlockWorkload(
        **{"tokens": ROWS * SEQ, "rows": ROWS, "seq": SEQ, "tp": 1, "sp": False, "compute": 4},
        **{"stack": SHOAL, "recompute": recompute, "cpu": True, "dropout": False, "cp": 1},
        **{"context": None, "adapters": None, "compiled": True},
    )
    assert sum(held.values()) == model.layers * block_activations(model, False, False, work).deferred
    deferred.end()
    deferred.compute(0, 0)
    assert_close([piece.tensor.grad for piece in placed.gradients.pieces], expected, 1e-6)
    assert all(one.linear.carriers is None for one in waiting)


def test_a_repeated_block_keeps_no_product_of_packed_weights() -> None:
    """Torch 2.11 did: functions of autograd, such as the product of weights in NF4, lay outside of what is repeated."""
    adapters = Adapters(rank=4, alpha=8, targets=("q_proj", "up_proj", "down_proj"), base="nf4")
    model = Model(**{**SHAPE, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 128, "adapters": adapters})
    placed = place(model, "aot_eager", "recompute=full")
    step(placed, [rows(model)])
    compiled(placed)
    assert saved(placed, rows(model)) == listed(model, "full", 4)


def saved(placed: Placed, batch: MicroBatch) -> list[int]:
    """Bytes of what one block keeps beside weights and what all layers share, the smallest first."""
    (segment,) = placed.segments
    decoder = segment.network.model
    hidden = decoder.embed(batch.tokens, batch.positions, batch.noise).detach().requires_grad_()
    turned = decoder.shape.positions == "rotary"
    rotation = tables(decoder.shape, None, batch.positions, decoder.compute) if turned else None
    shared = [*decoder.layers["0"].parameters(), batch.positions, *(rotation or ())]
    shared += [] if batch.noise is None else [batch.noise]
    shared += [] if batch.documents is None else [batch.documents.ends, batch.documents.sizes]
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
