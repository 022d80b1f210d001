"""Which parameters travel together. Decided here, priced by ``predict`` and obeyed by ``parallel``."""

from __future__ import annotations

from collections.abc import Iterable


def buckets(sizes: Iterable[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    """Cut parameters, given as (name, bytes) in forward order, into buckets whose gradients are summed at once.

    Gradients appear from the last layer to the first, so buckets are filled in that order: the first one is
    complete, and on its way, while the backward pass is still working on the rest. A bucket closes before it
    would outgrow its limit; a parameter larger than that has one of its own.
    """
    cut: list[list[str]] = []
    filled = 0
    for name, size in reversed(list(sizes)):
        if not cut or filled + size > bucket_bytes:
            cut.append([])
            filled = 0
        cut[-1].append(name)
        filled += size
    return cut
