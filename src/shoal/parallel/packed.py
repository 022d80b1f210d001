"""Frozen weights in 4 bits (``facts/nf4.py``): each rank packs the rows it holds, a few at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from shoal.facts.nf4 import AT_ONCE, unpacked_width
from shoal.models.experts import GroupedLinear
from shoal.models.initial import Fill, Slice
from shoal.models.linear import Linear
from shoal.models.nf4 import PACKED, pack, packed_like, unpack


def pack_weights(blocks: Iterable[nn.Module]) -> None:
    """Replace the weight of every projection in meta-device blocks, routed experts included and adapters not, with
    room for packed bytes.
    """
    for module in (child for block in blocks for child in block.modules()):
        if isinstance(module, Linear | GroupedLinear) and not module.weight.requires_grad:
            module.weight = nn.Parameter(packed_like(module.weight), requires_grad=False)


@torch.no_grad()
def fill_packed(weights: Iterable[tuple[str, Slice]], give: Fill) -> None:
    """Fill and pack the packed weights. Values come in fp32, whatever dtype the run computes in."""
    for name, part in weights:
        if part.local.dtype != PACKED:
            continue
        for matrix in matrices(part):
            count, width = matrix.local.shape[0], unpacked_width(matrix.local.shape[1])
            step = max(1, AT_ONCE // width)
            for start in range(0, count, step):
                bytes_of = matrix.local[start : start + step]
                rows = torch.empty(len(bytes_of), width, device=part.local.device)
                give([(name, rows_of(matrix, rows, start, matrix.offset[-1]))])
                bytes_of.copy_(pack(rows))


def matrices(part: Slice) -> Iterator[Slice]:
    """The matrices of a slice: one per expert of a stack, by rows and columns; a matrix as it is."""
    if part.local.dim() == 2:
        yield part
        return
    for number, local in enumerate(part.local):
        yield Slice(local, part.global_shape, (part.offset[0] + number, *part.offset[1:]))


def rows_of(matrix: Slice, rows: torch.Tensor, start: int, column: int) -> Slice:
    """A slice to fill: the rows from ``start`` on and the columns from ``column`` on, counted in the whole matrix."""
    *experts, first, _ = matrix.offset
    values = rows if not experts else rows[None]
    return Slice(values, matrix.global_shape, (*experts, first + start, column))


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values after a round trip through packing."""
    return unpack(pack(rows), dtype)
