"""Half-precision matrix products that accumulate in at least fp32, with no product rounded, or written and read again.

Custom operators, so that a dry run and a memory tracker see only the sum: a CPU has no such product and needs
temporaries.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("shoal::wide_product", mutates_args=())
def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left · right."""
    wide = _wide(left)
    if wide == left.dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=wide) if left.is_cuda else (left @ right).to(wide)


@wide_product.register_fake
def _empty(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=_wide(left))


@torch.library.custom_op("shoal::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left · right, in place."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@add_product_.register_fake
def _nothing(total: Tensor, left: Tensor, right: Tensor) -> None: ...


def _wide(matrix: Tensor) -> torch.dtype:
    return torch.promote_types(matrix.dtype, torch.float32)
