"""Parameter server: the ranges that each server holds and how workers split a step, decided once for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.facts.layout.buckets import even_share


class ServedRange(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter."""

    name: str
    start: int
    stop: int


def served_ranges(parameters: Sequence[tuple[str, int]], servers: int) -> list[list[ServedRange]]:
    """For each server, its ranges of the parameters, given as (name, elements) in forward order.

    All parameters form one flat vector, split into equal ranges, so what a worker exchanges with a server is one
    contiguous range. Whole parameters or buckets would balance badly: an embedding may be half of a model.
    """
    total = sum(size for _, size in parameters)
    share = even_share(total, servers)
    found: list[list[ServedRange]] = []
    for server in range(servers):
        first, last = min(total, server * share), min(total, (server + 1) * share)
        mine, before = [], 0
        for name, size in parameters:
            start, stop = max(first - before, 0), min(last - before, size)
            if start < stop:
                mine.append(ServedRange(name, start, stop))
            before += size
        found.append(mine)
    return found


def elements(ranges: Sequence[ServedRange]) -> int:
    return sum(one.stop - one.start for one in ranges)


def item_of(step: int, part: int, workers: int) -> int:
    """The index of a work item: part ``part`` of step ``step`` (from 1), the share that one data rank would do."""
    return (step - 1) * workers + part


def step_and_part(item: int, workers: int) -> tuple[int, int]:
    return item // workers + 1, item % workers
