"""An expert's down projection, directly from gate and up: (activation(gate) · up · weight) · Wᵀ.

If a token's experts are on this rank, its routing weight multiplies the narrow rows before the projection instead of
the wide ones after it: so the outputs need not be saved for the weight's gradient, nor read again. Only the outputs of
gate and up are saved. Everything in between is recomputed in the backward pass, by the kernel that computes its
gradients: a custom operator, since the compiler makes two kernels of it, which on an H200 take 0.42 ms for 65,536 rows
of 2 · 768. 4-bit matrices are unpacked in each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.models.grouped_product import (
    as_multiplied,
    input_gradient,
    matrix_widths,
    product,
    takes_groups,
    weight_gradient,
)
from shoal.models.in_triton import in_triton
from shoal.models.mlp import ACTIVATIONS, DERIVATIVES

WARPS = 4
# The activation that the kernel supports; others run with torch's operators.
IN_KERNEL = "silu"

GatedKernel = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], None]


def way_out(
    gate_up: Tensor, weight: Tensor, ends: Tensor, activation: str, weights: Tensor | None = None
) -> Tensor:
    """[N, out] from gate and up side by side [N, 2·width], sorted by expert; weights [N, 1], or None for 1."""
    if torch.compiler.is_compiling() and not takes_groups(gate_up, *matrix_widths(weight)):
        # The host reads the number of tokens per expert, which a compiled graph may not do within an autograd
        # function.
        return product(gated(gate_up, weights, activation), as_multiplied(weight, gate_up), ends)
    output: Tensor = _WayOut.apply(gate_up, weight, ends, weights, activation)
    return output


class _WayOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor, ends: Tensor, weights: Tensor | None, activation: str
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weight, ends, weights)
        ctx.activation = activation
        return product(gated(gate_up, weights, activation), as_multiplied(weight, gate_up), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight, ends, weights = ctx.saved_tensors
        of_inner = input_gradient(gradient, as_multiplied(weight, gradient), ends)
        of_gate_up, of_weights, inner = gated_gradients(gate_up, weights, of_inner, ctx.activation)
        del of_inner
        of_matrix = weight_gradient(gradient, inner, ends) if ctx.needs_input_grad[1] else None
        return of_gate_up, of_matrix, None, None if weights is None else of_weights, None


def gated(gate_up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    inner = ACTIVATIONS[activation](gate) * up
    return inner if weights is None else inner * weights


@torch.library.custom_op("shoal::gated_gradients", mutates_args=())
def gated_gradients(
    gate_up: Tensor, weights: Tensor | None, gradient: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of ``gated``: gradients of gate and up, and of weights; and its recomputed output."""
    found = of_gate_up, of_weights, inner = _unmade(gate_up, weights, gradient, activation)
    wide = gate_up.dtype == torch.float64
    kernel = None if wide or not gate_up.is_cuda or activation != IN_KERNEL else in_triton(_compiled)
    if kernel is not None:
        kernel(gate_up, weights, gradient, *found)
        return found
    gate, up = gate_up.chunk(2, -1)
    activated = ACTIVATIONS[activation](gate)
    torch.mul(activated, up, out=inner)
    if weights is not None:
        torch.sum(inner * gradient, -1, keepdim=True, out=of_weights)
        inner *= weights
        gradient = gradient * weights
    of_gate, of_up = of_gate_up.chunk(2, -1)
    of_gate.copy_(DERIVATIVES[activation](gradient * up, gate))
    torch.mul(gradient, activated, out=of_up)
    return found


@gated_gradients.register_fake
def _unmade(
    gate_up: Tensor, weights: Tensor | None, gradient: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    one_each = gradient.new_empty(0 if weights is None else gradient.shape[0], 1)
    return torch.empty_like(gate_up), one_each, torch.empty_like(gradient)


def _compiled(triton: Any, tl: Any) -> GatedKernel:
    @triton.jit
    def differentiate_row(
        gate_up,
        weights,
        gradient,
        of_gate_up,
        of_weights,
        inner,
        width,
        features: tl.constexpr,
        weighted: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        feature = tl.arange(0, features)
        here = feature < width
        both = gate_up + row * 2 * width + feature
        gate = tl.load(both, here, 0.0).to(tl.float32)
        up = tl.load(both + width, here, 0.0).to(tl.float32)
        found = tl.load(gradient + row * width + feature, here, 0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-gate))
        activated = gate * sigmoid
        made = activated * up
        if weighted:
            tl.store(of_weights + row, tl.sum(found * made, 0).to(of_weights.dtype.element_ty))
            weight = tl.load(weights + row).to(tl.float32)
            found *= weight
            made *= weight
        tl.store(inner + row * width + feature, made.to(inner.dtype.element_ty), here)
        of_gate = found * up * sigmoid * (1 + gate * (1 - sigmoid))
        both = of_gate_up + row * 2 * width + feature
        tl.store(both, of_gate.to(of_gate_up.dtype.element_ty), here)
        tl.store(both + width, (found * activated).to(of_gate_up.dtype.element_ty), here)

    def run(
        gate_up: Tensor,
        weights: Tensor | None,
        gradient: Tensor,
        of_gate_up: Tensor,
        of_weights: Tensor,
        inner: Tensor,
    ) -> None:
        rows, width = gradient.shape
        if gradient.numel():
            differentiate_row[(rows,)](
                gate_up.contiguous(), gate_up if weights is None else weights.contiguous(), gradient.contiguous(),
                of_gate_up, of_weights, inner, width, triton.next_power_of_2(width), weights is not None,
                num_warps=WARPS,
            )  # fmt: skip

    return run
