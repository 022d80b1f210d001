"""Matrix products in fp8: operands of one byte a value, each with a scale, summed up in fp32, results in bf16.

Eight bits have two forms: e4m3, with three digits and values to 448, for activations and weights; e5m2, with two digits
and values to 57,344, for gradients, whose sizes differ more. A scale brings the largest value of an operand to the
largest of its form. It is one of a whole operand (``tensorwise``), or one of each of its rows (``rowwise``): of every
line of values that is multiplied and summed up, so in each product an operand's other dimension.

A weight's largest values are found once a step and over all ranks that share it (``parallel/float8_scales.py``), so
that every layout rounds it alike. An activation's are those of what is multiplied here: of one micro-batch, on one
tensor rank's features.

torch 2.11 has these products for Hopper and newer GPUs, and for CPUs, slowly: there they prove the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.facts.recipe import Scaling

PRECISE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
# The smallest scale: an operand of zeros has one too, and its inverse is finite.
LEAST = 2.0**-100


class WeightScales(NamedTuple):
    """Of a weight [out, in], as its two products take them: one of all, or of each output and of each input."""

    forward: Tensor
    backward: Tensor | None = None  # None: the same, which the compiler does not take twice


class Float8Product:
    """x·Wᵀ and its gradients, with operands rounded to fp8."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        # Rows have scales of their own and need the range of gradients less than their digits.
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
        """``across``: the columns of what is given are the rows of the operand."""
        turned = operand.T if across else operand
        # Of all values, the largest is found as they lie: by column takes the compiler's kernel five times as long, and
        # it would not see that this is the largest that it has found before.
        searched = operand if self.scaling == "tensorwise" else turned
        scale = scale_of(largest(searched, self.scaling), form)
        return rounded(turned, scale, form), scale

    def _multiply(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, over_tokens: bool = False
    ) -> Tensor:
        """a·bᵀ, of operands that lie row by row, which is how the kernels want both."""
        b_scale = b_scale.T if self.scaling == "rowwise" else b_scale
        # Private, and the only form that the compiler of torch 2.11 traces; functional.scaled_mm is the public one.
        return torch._scaled_mm(
            a,
            b.T,
            scale_a=a_scale,
            scale_b=b_scale,
            out_dtype=torch.bfloat16,
            # Hopper can sum up quickly, in few bits, and drops the rest, which adds up over many tokens: of
            # 32,768 of them the gradients of weights were 13 % too small (of a 1.2B model, benchmarks/fp8.py).
            use_fast_accum=not over_tokens,
        )


def largest(operand: Tensor, scaling: Scaling) -> Tensor:
    """Of all values, or of each row, [rows, 1]."""
    if scaling == "tensorwise":
        return torch.linalg.vector_norm(operand, torch.inf).float()
    return torch.linalg.vector_norm(operand, torch.inf, 1, keepdim=True).float()


def scale_of(most: Tensor, form: torch.dtype) -> Tensor:
    """What the rounded values are multiples of."""
    return (most / torch.finfo(form).max).clamp(min=LEAST)


def rounded(operand: Tensor, scale: Tensor, form: torch.dtype) -> Tensor:
    """In fp8, laid out row by row; as it is, if it has been rounded with this scale already."""
    if operand.dtype == form:
        return operand.contiguous()
    most = torch.finfo(form).max
    # In place: eager blocks hold one copy in fp32 at a time, and not two.
    return operand.to(torch.float32, copy=True).div_(scale).clamp_(-most, most).to(form).contiguous()
