"""Grouped matrix products: tokens, sorted by expert, with the matrix of their expert; forward and both gradients.

Uses torch's grouped product where it applies; otherwise one product per expert. Frozen 4-bit matrices
(``models/nf4.py``) are unpacked for each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.facts.nf4 import unpacked_width
from shoal.models.nf4 import PACKED, unpacked_beside

# The dtype that torch's grouped product supports on every device, also compiled and on meta tensors (2.11 to 2.13),
# and the byte alignment that it needs for rows. Private, since torch 2.11 has no public name for it.
GROUPED = torch.bfloat16
ALIGNED = 16


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x·Wᵀ: x [N, in], weight [experts, out, in], the ends of each expert's tokens."""
    if takes_groups(x, *weight.shape[1:]):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return torch.cat([part @ matrix.T for part, matrix in zip(parts(x, ends), weight.unbind(), strict=True)])


def input_gradient(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """gradient·W: gradient [N, out]."""
    if takes_groups(gradient, *weight.shape[1:]):
        return torch._grouped_mm(gradient, weight, offs=ends)
    each = zip(parts(gradient, ends), weight.unbind(), strict=True)
    return torch.cat([part @ matrix for part, matrix in each])


def weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """gradientᵀ·x of each expert's tokens: [experts, out, in]."""
    if takes_groups(x, gradient.shape[1], x.shape[1]):
        return torch._grouped_mm(gradient.T, x, offs=ends)
    each = zip(parts(gradient, ends), parts(x, ends), strict=True)
    return torch.stack([part.T @ read for part, read in each])


def packed_product(x: Tensor, packed: Tensor, ends: Tensor) -> Tensor:
    """Like ``product``, with frozen 4-bit matrices, [experts, out, bytes]."""
    if torch.compiler.is_compiling() and not takes_groups(x, *matrix_widths(packed)):
        return product(x, as_multiplied(packed, x), ends)  # as in ``models/gated.py``
    output: Tensor = _PackedGroups.apply(x, packed, ends)
    return output


class _PackedGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(packed, ends)
        return product(x, as_multiplied(packed, x), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        packed, ends = ctx.saved_tensors
        return input_gradient(gradient, as_multiplied(packed, gradient), ends), None, None


def as_multiplied(weight: Tensor, beside: Tensor) -> Tensor:
    """Matrices as multiplied with ``beside``: 4-bit ones are unpacked, for this one product."""
    if weight.dtype != PACKED:
        return weight
    return unpacked_beside(weight.flatten(0, 1), beside).unflatten(0, weight.shape[:2])


def matrix_widths(weight: Tensor) -> tuple[int, int]:
    """Output and input features of each matrix."""
    _, out, inputs = weight.shape
    return out, unpacked_width(inputs) if weight.dtype == PACKED else inputs


def takes_groups(x: Tensor, *widths: int) -> bool:
    """Whether torch's grouped product supports these tokens and a matrix of these widths."""
    aligned = all(width * x.element_size() % ALIGNED == 0 for width in widths)
    return x.dtype == GROUPED and aligned and x.shape[0] > 0


def parts(x: Tensor, ends: Tensor) -> Iterator[Tensor]:
    """The rows of each expert."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return iter(x.split(on_host(counts[None], x.shape[0])[0]))


def on_host(counts: Tensor, rows: int) -> list[list[int]]:
    """The number of rows per expert, copied to the host, which waits for it. The first list sums to ``rows``.

    A dry run, which has no values to read, substitutes an even division (``prove/balanced_routing.py``).
    """
    read: list[list[int]] = counts.tolist()
    return read
