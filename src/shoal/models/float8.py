"""Matrix products in fp8: one-byte operands with scales, accumulated in fp32, results in bf16.

There are two formats: e4m3, with three mantissa bits and values to 448, for activations and weights; e5m2, with two
mantissa bits and values to 57,344, for gradients, whose magnitudes vary more. A scale maps the largest value of an
operand to the largest of its format. There is one per operand (``tensorwise``), or one per row (``rowwise``), that is
per line of values multiplied and summed; so each product scales an operand along its other dimension.

A weight's largest values are computed once per step over all ranks that share it (``parallel/float8_scales.py``), so
that every layout rounds it alike. An activation's are those of the local operand: one micro-batch, on one tensor
rank's features.

torch 2.11 has these products for Hopper and newer GPUs, and, slowly, for CPUs, where they serve to verify the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.facts.recipe import Scaling

PRECISE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
# The smallest scale, so that an operand of zeros has a scale with a finite inverse.
LEAST = 2.0**-100


class WeightScales(NamedTuple):
    """Scales of a weight [out, in] for its two products: one for all values, or one per output and one per input."""

    forward: Tensor
    backward: Tensor | None = None  # None: as forward; the compiler refuses the same tensor twice


class Float8Product:
    """x·Wᵀ and its gradients, with operands rounded to fp8."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        # Row scales adapt to gradients, so these need the precision more than the range.
        self.of_gradients = WIDE if scaling == "tensorwise" else PRECISE

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: WeightScales | None) -> Tensor:
        assert scales is not None
        rows = x.flatten(0, -2)
        output = self._multiply(
            *self._rounded(rows, PRECISE), rounded(weight, scales.forward, PRECISE), scales.forward
        )
        output = output if bias is None else output + bias
        return output.unflatten(0, x.shape[:-1])

    def input_gradient(self, gradient: Tensor, weight: Tensor, scales: WeightScales | None) -> Tensor:
        assert scales is not None
        rows = gradient.flatten(0, -2)
        scale = scales.forward if scales.backward is None else scales.backward
        across = rounded(weight.T, scale, PRECISE)
        back = self._multiply(*self._rounded(rows, self.of_gradients), across, scale)
        return back.unflatten(0, gradient.shape[:-1])

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        return self._multiply(
            *self._rounded(gradient, self.of_gradients, across=True),
            *self._rounded(x, PRECISE, across=True),
            over_tokens=True,
        )

    def _rounded(self, operand: Tensor, form: torch.dtype, across: bool = False) -> tuple[Tensor, Tensor]:
        """``across``: the operand's rows are the columns of the given tensor."""
        turned = operand.T if across else operand
        # Tensorwise, search in memory order: by column, the compiler's kernel takes five times as long, and the
        # compiler would not recognise a maximum that it has already computed.
        searched = operand if self.scaling == "tensorwise" else turned
        scale = scale_of(largest(searched, self.scaling), form)
        return rounded(turned, scale, form), scale

    def _multiply(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, over_tokens: bool = False
    ) -> Tensor:
        """a·bᵀ with row-major operands, as the kernels require."""
        b_scale = b_scale.T if self.scaling == "rowwise" else b_scale
        # Private, and the only form that torch 2.11's compiler traces; functional.scaled_mm is the public one.
        return torch._scaled_mm(
            a,
            b.T,
            scale_a=a_scale,
            scale_b=b_scale,
            out_dtype=torch.bfloat16,
            # Hopper's fast accumulation drops low bits, which adds up over many tokens: over 32,768 of them weight
            # gradients were 13 % too small (in a 1.2B model, benchmarks/fp8.py).
            use_fast_accum=not over_tokens,
        )


def largest(operand: Tensor, scaling: Scaling) -> Tensor:
    """The largest absolute value, or that of each row, [rows, 1]."""
    if scaling == "tensorwise":
        return torch.linalg.vector_norm(operand, torch.inf).float()
    return torch.linalg.vector_norm(operand, torch.inf, 1, keepdim=True).float()


def scale_of(most: Tensor, form: torch.dtype) -> Tensor:
    """The scale, of which rounded values are multiples."""
    return (most / torch.finfo(form).max).clamp(min=LEAST)


def rounded(operand: Tensor, scale: Tensor, form: torch.dtype) -> Tensor:
    """In fp8, row-major; returned unchanged if it has been rounded with this scale already."""
    if operand.dtype == form:
        return operand.contiguous()
    most = torch.finfo(form).max
    # In place: eager blocks then hold one fp32 copy at a time instead of two.
    return operand.to(torch.float32, copy=True).div_(scale).clamp_(-most, most).to(form).contiguous()
