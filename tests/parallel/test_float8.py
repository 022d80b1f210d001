"""Products in fp8: as their definition says, with scales that are those of whole weights in every layout."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from tests.parallel.sharding import ROWS, SMALL
from tests.ranks import run_ranks
from tests.thinned import thinned
from torch import Tensor

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.parameters import by_name
from shoal.facts.recipe import Scaling
from shoal.models.decoder import build
from shoal.models.float8 import (
    PRECISE,
    WIDE,
    Float8Product,
    WeightScales,
    largest,
    scale_of,
)
from shoal.models.initial import fill
from shoal.models.linear import Linear
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.parallel.stage_module import MicroBatch

SEQ = 16
MODEL = Model(
    **{
        **SMALL,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 96,
        "layers": 2,
        "init_std": 0.05,
    }
)
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise")
LAYOUTS = [
    "dp=2",
    "fsdp=2",
    "fsdp=2,zero=1",
    "fsdp=2,zero=2",
    "tp=2",
    "tp=2,sp=0",
    "pp=2",
    "pp=2,schedule=zb",
]


def digits(operand: Tensor, form: torch.dtype, by_row: bool) -> Tensor:
    """An operand as fp8 has it, in double precision: rounded to so many digits below its largest value's."""
    most = operand.double().abs().amax(1, keepdim=True) if by_row else operand.double().abs().amax()
    scale = (most.float() / torch.finfo(form).max).clamp(min=2.0**-100)
    kept = (operand.float() / scale).to(form)
    return kept.double() * scale.double()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_product_and_its_gradients_are_those_of_rounded_operands(scaling: Scaling) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(size, generator=generator).bfloat16() for size in ((2, 16, 64), (48, 64), (2, 16, 48))
    )
    by_row = scaling == "rowwise"
    of_gradients = PRECISE if by_row else WIDE
    linear = Linear(64, 48, bias=False).bfloat16()
    linear.weight.data = weight
    linear.product = Float8Product(scaling)
    linear.weight_scales = WeightScales(
        scale_of(largest(weight, scaling), PRECISE), scale_of(largest(weight.T, scaling), PRECISE)
    )
    x.requires_grad = True
    output = linear(x)
    output.backward(gradient)
    rows, back = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    assert x.grad is not None and linear.weight.grad is not None
    for found, left, right, form in (
        (output.flatten(0, 1), rows, weight, PRECISE),
        (x.grad.flatten(0, 1), back, weight.T, of_gradients),
        (linear.weight.grad, back.T, rows.T, of_gradients),
    ):
        expected = digits(left, form, by_row) @ digits(right, PRECISE, by_row).T
        # The result has the eight digits of bf16.
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3)


def place(
    rank: int, layout: str, scaling: Scaling | None, compile_with: str | None = None
) -> tuple[Placed, Mesh]:
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    network = build(MODEL, compute=torch.bfloat16, dtype=torch.float32, length=SEQ)
    values = partial(fill, model=MODEL, seed=0)
    placed = apply(network, mesh, TuneSection(), values, SEQ, compile_with=compile_with, fp8=scaling)
    return placed, mesh


def step(placed: Placed, mesh: Mesh, rows: int) -> None:
    """One step on ``rows`` sequences at a time, and an update that is the gradient's own size."""
    each = ROWS // (mesh.layout.dp * mesh.layout.fsdp)
    batches = []
    for first in range(mesh.data_index * each, (mesh.data_index + 1) * each, rows):
        tokens = torch.arange(SEQ) * 7 + torch.arange(first, first + rows)[:, None] * 13
        tokens = tokens % MODEL.vocab
        positions = torch.arange(SEQ).expand(rows, SEQ).contiguous()
        batches.append(MicroBatch(tokens, positions, None, tokens.roll(-1, 1), None))
    placed.gradients.start_step()
    placed.executor.forward_backward(batches, 1 / (ROWS * SEQ))
    placed.gradients.finish_step()
    placed.shared.sum(placed.gradients.pieces)
    for piece in placed.gradients.pieces:
        assert piece.tensor.grad is not None
        piece.tensor.data -= 0.1 * piece.tensor.grad
    placed.after_update()


Found = tuple[dict[str, tuple[Tensor, ...]], dict[str, tuple[Tensor, tuple[slice, ...], int, int]]]


def train(
    rank: int, world: int, layout: str, scaling: Scaling, rows: int, compile_with: str | None = None
) -> Found:
    """The scales that a rank has after two steps, by the weight's name, and its gradients."""
    placed, mesh = place(rank, layout, scaling, compile_with)
    step(placed, mesh, rows)
    step(placed, mesh, rows)
    assert placed.compiled is None or placed.compiled.problem is None
    scales = {
        name: tuple(one.clone() for one in child.weight_scales if one is not None)
        for segment in placed.segments
        for name, child in segment.network.named_modules()
        if isinstance(child, Linear) and child.weight_scales is not None
    }
    gradients = {
        piece.name: (piece.tensor.grad.flatten().clone(), piece.box.slices, piece.start, piece.stop)
        for piece in placed.gradients.pieces
        if piece.tensor.grad is not None
    }
    return scales, gradients


@cache
def one_process(scaling: Scaling) -> Found:
    (found,) = run_ranks(1, train, "dp=1", scaling, 1)
    return found


# Every layout with one of the two in turn; all of the other half are among the long tests.
@pytest.mark.parametrize(
    ("layout", "scaling"),
    [
        pytest.param(layout, scaling, marks=() if (row + column) % 2 == 0 else pytest.mark.long)
        for row, layout in enumerate(LAYOUTS)
        for column, scaling in enumerate(SCALINGS)
    ],
)
def test_every_layout_trains_with_the_same_scales(layout: str, scaling: Scaling) -> None:
    """One sequence at a time everywhere, for an activation's scale is of what is multiplied together."""
    whole, gradients = one_process(scaling)
    split = Layout.parse(layout)
    for scales, parts in run_ranks(2, train, layout, scaling, 1):
        assert scales and len(scales) == 7 * MODEL.layers // split.pp
        for name, found in scales.items():
            expected = whole[name]
            if split.tp == 1 or scaling == "tensorwise":
                pairs = zip(found, expected, strict=True)
            else:
                # Rows, or columns, that this rank has.
                box = parts[f"{name}.weight"][1]
                pairs = iter([(found[0], expected[0][box[0]]), (found[1], expected[1][box[1]])])
            for one, other in pairs:
                # Tensor ranks round otherwise, so their weights differ after two steps.
                torch.testing.assert_close(one, other, rtol=2**-6 if split.tp > 1 else 0, atol=0)
        for name, (gradient, box, start, stop) in parts.items():
            reference = gradients[name][0].view(by_name(MODEL)[name].shape)[box].flatten()[start:stop]
            difference = (gradient - reference).norm() / gradients[name][0].norm()
            # Of what it multiplies a tensor rank has other features than its peers, and so another scale.
            assert difference <= (0.15 if split.tp > 1 else 1e-6), (name, float(difference))


@pytest.mark.parametrize("scaling", thinned(SCALINGS, 2))
def test_compiled_blocks_compute_the_same(scaling: Scaling) -> None:
    ((scales, gradients),) = run_ranks(1, train, "dp=1", scaling, 4)
    ((compiled_scales, compiled),) = run_ranks(1, train, "dp=1", scaling, 4, "aot_eager")
    for name, (gradient, *_) in gradients.items():
        torch.testing.assert_close(compiled[name][0], gradient, rtol=0, atol=0)
    torch.testing.assert_close(compiled_scales, scales, rtol=0, atol=0)
