"""Merge an adapter's weights into its base network's, and compute DoRA's initial row norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import LORA_FACTORS, MAGNITUDE, adapter_parameters, beside, by_name
from shoal.facts.nf4 import is_packed
from shoal.models.initial import Fill, Slice
from shoal.parallel.packed import matrices, rounded, rows_of
from shoal.train.checkpoint.read import Checkpoint, Wanted

# Elements of a frozen weight in memory at a time, beyond what a rank holds.
AT_ONCE = 1 << 24


def merged(checkpoint: Checkpoint, model: Model, base: Fill, state: str = "weight") -> Fill:
    """W + alpha/rank · B·A, summed in at least fp32, with DoRA's row norms. ``model``: with adapters; ``base`` fills W.

    Each rank reads only what its part of W needs of A and B. ``state``: the adapters, or their average.
    """
    adapters = model.adapters
    assert adapters is not None
    targets = {beside(one.name) for one in adapter_parameters(model)}

    @torch.no_grad()
    def fill(slices: list[tuple[str, Slice]]) -> None:
        plain = adapters.kind == "lora"
        base([one for one in slices if plain or one[0] not in targets])
        for name, part in slices:
            if name not in targets:
                continue
            (first, left), (_, columns) = part.offset, part.local.shape
            if plain:
                _add(checkpoint, adapters, state, name, part, part.local)
                continue
            # A row's norm covers the whole row.
            for start, rows in _rows(base, name, part, part.local.dtype):
                whole = Slice(rows, part.global_shape, (first + start, 0))
                wide = torch.promote_types(rows.dtype, torch.float32)
                _add(checkpoint, adapters, state, name, whole, summed := rows.to(wide))
                lengths = torch.empty(len(rows), dtype=checkpoint.dtype(state))
                path = name.removesuffix(".weight")
                checkpoint.read([Wanted(state, f"{path}.{MAGNITUDE}", (first + start,), lengths)])
                summed *= (lengths.to(summed) / torch.linalg.vector_norm(summed, dim=1))[:, None]
                part.local[start : start + len(rows)].copy_(summed[:, left : left + columns])

    return fill


def _add(
    checkpoint: Checkpoint, adapters: Adapters, state: str, name: str, part: Slice, onto: Tensor
) -> None:
    """Add the adapter's product for part of a weight to ``onto``."""
    (first, left), (rows, columns), path = part.offset, part.local.shape, name.removesuffix(".weight")
    into = torch.empty(adapters.rank, columns, dtype=checkpoint.dtype(state))
    out = torch.empty(rows, adapters.rank, dtype=into.dtype)
    checkpoint.read(
        [
            Wanted(state, f"{path}.{LORA_FACTORS[0]}.weight", (0, left), into),
            Wanted(state, f"{path}.{LORA_FACTORS[1]}.weight", (first, 0), out),
        ]
    )
    wide = torch.promote_types(torch.promote_types(into.dtype, onto.dtype), torch.float32)
    added = adapters.scale * (out.to(wide) @ into.to(wide))
    onto.copy_(onto.to(wide) + added.to(onto.device))


def with_lengths(others: Fill, base: Fill, model: Model, compute: torch.dtype) -> Fill:
    """First adapters where they include row norms: those of the frozen weights in compute precision."""

    @torch.no_grad()
    def fill(slices: list[tuple[str, Slice]]) -> None:
        others([one for one in slices if not one[0].endswith(MAGNITUDE)])
        for name, part in slices:
            if not name.endswith(MAGNITUDE):
                continue
            weight = beside(name)
            shape = by_name(model)[weight].shape
            wanted = Slice(part.local[:, None].expand(-1, shape[1]), shape, (*part.offset, 0))
            for start, rows in _rows(base, weight, wanted, compute):
                found = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
                part.local[start : start + len(rows)].copy_(found)

    return fill


def in_nf4(base: Fill, model: Model) -> Fill:
    """What ``base`` fills in, after a round trip through 4-bit packing."""
    packed = {one.name for one in by_name(model.base).values() if is_packed(one)}

    @torch.no_grad()
    def fill(slices: list[tuple[str, Slice]]) -> None:
        if plain := [one for one in slices if one[0] not in packed]:
            base(plain)
        for name, part in slices:
            if name not in packed:
                continue
            left, columns = part.offset[-1], part.local.shape[-1]
            for matrix in matrices(part):
                for start, rows in _rows(base, name, matrix, torch.float32):
                    values = rounded(rows, part.local.dtype)
                    matrix.local[start : start + len(rows)].copy_(values[:, left : left + columns])

    return fill


def _rows(base: Fill, name: str, part: Slice, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Whole rows of a frozen weight that overlap a part, a few at a time, each time with the first row's index in
    the part.
    """
    width, count = part.global_shape[-1], part.local.shape[0]
    step = max(1, AT_ONCE // width)
    for start in range(0, count, step):
        rows = torch.empty(min(step, count - start), width, dtype=dtype, device=part.local.device)
        base([(name, rows_of(part, rows, start, 0))])
        yield start, rows
