"""Time matrix products as linear layers run them: output, input gradient, weight gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.facts.measurements import Product
from shoal.prove.calibrate.sampling import Pool, Sample
from shoal.prove.calibrate.sizes import Widths

KIND = "product"


def samples(pool: Pool, precision: str, widths: Widths) -> Iterator[Sample]:
    """Laid out in memory as autograd has them."""
    for inner, columns, tokens in widths:
        for rows in tokens:
            size = rows, inner, columns
            yield Sample((KIND, precision, "forward", rows, inner, columns), partial(_forward, pool, *size))
            yield Sample((KIND, precision, "input", rows, columns, inner), partial(_input, pool, *size))
            yield Sample((KIND, precision, "weight", inner, rows, columns), partial(_weight, pool, *size))


def _forward(pool: Pool, rows: int, inner: int, columns: int) -> partial[Tensor]:
    return partial(F.linear, pool.take(rows, inner), pool.take(columns, inner))


def _input(pool: Pool, rows: int, inner: int, columns: int) -> partial[Tensor]:
    return partial(torch.mm, pool.take(rows, columns), pool.take(columns, inner))


def _weight(pool: Pool, rows: int, inner: int, columns: int) -> partial[Tensor]:
    return partial(torch.mm, pool.take(rows, columns).t(), pool.take(rows, inner))


def largest(widths: Widths) -> int:
    """Elements of the operands of the largest product."""
    return max(
        rows * inner + inner * columns + rows * columns
        for inner, columns, tokens in widths
        for rows in tokens
    )


def found(measured: Sequence[Sample], precision: str) -> tuple[Product, ...]:
    rows = [sample for sample in measured if sample.key[:2] == (KIND, precision)]
    return tuple(
        Product.model_validate(
            dict(zip(("way", "rows", "inner", "columns"), sample.key[2:], strict=True))
            | {"seconds": sample.seconds}
        )
        for sample in sorted(rows, key=lambda sample: str(sample.key))
    )
