"""FSDP gathers weights of fp8 products in fp8: a byte a value, and the numbers of weights rounded after gathering."""

from __future__ import annotations

import pytest
import torch
from tests.parallel.sharding import ROWS
from tests.parallel.test_float8 import MODEL, place, step
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.layout import Layout
from shoal.models.float8 import PRECISE
from shoal.models.linear import Linear
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel import float8_gather

CASES = [
    ("fsdp=2", None),
    ("fsdp=2,unit=2,recompute=full", None),
    pytest.param("fsdp=2,recompute=selective", "aot_eager", marks=pytest.mark.long),
    ("dp=2,fsdp=2", None),
    ("fsdp=2,tp=2", None),
    ("fsdp=2,pp=2,schedule=zb", None),
]


def train(
    rank: int, world: int, layout: str, compile_with: str | None, narrow: bool
) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    """What a rank updates after two steps of two micro-batches, with its gradients; bytes gathered in the second."""
    if not narrow:
        float8_gather.rounded_before_gathering = lambda scaling: False
    placed, mesh = place(rank, layout, "tensorwise", compile_with)
    rows = ROWS // (2 * mesh.layout.data_ranks)
    step(placed, mesh, rows)
    with CollectiveCounter(mesh.names) as counter:
        step(placed, mesh, rows)
    assert placed.compiled is None or placed.compiled.problem is None
    linears = [
        child
        for segment in placed.segments
        for child in segment.network.model.layers.modules()
        if isinstance(child, Linear)
    ]
    assert len(linears) == 7 * MODEL.layers // mesh.layout.pp
    assert all((child.rounded_weight is not None) == narrow for child in linears)
    if narrow:
        assert {child.rounded_weight.dtype for child in linears if child.rounded_weight is not None} == {
            PRECISE
        }
        held = placed.gradients.computed_with()
        sizes = {one.untyped_storage().size() for one in held}
        assert sizes == {0}  # nothing is gathered now, and what stands in for fp8 weights never has storage
    found = {}
    for piece in placed.gradients.pieces:
        assert piece.tensor.grad is not None
        found[piece.held.label] = piece.tensor.detach().clone(), piece.tensor.grad.clone()
    gathered = sum(one.bytes for one in counter.traffic() if one.op == "all_gather" and one.group == "fsdp")
    return found, gathered


@pytest.mark.parametrize(("layout", "compile_with"), CASES)
def test_it_is_equal_to_the_bit_and_half_as_much(layout: str, compile_with: str | None) -> None:
    world = Layout.parse(layout).world
    narrow = run_ranks(world, train, layout, compile_with, True)
    wide = run_ranks(world, train, layout, compile_with, False)
    for (ours, few), (theirs, many) in zip(narrow, wide, strict=True):
        assert ours.keys() == theirs.keys()
        for name, (weight, gradient) in ours.items():
            assert torch.equal(weight, theirs[name][0]), name
            assert torch.equal(gradient, theirs[name][1]) and gradient.dtype == torch.float32, name
        # Embedding, norms and head travel as they did.
        assert 0.5 * many < few < 0.85 * many
