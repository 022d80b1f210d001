"""Balanced routing for a dry run: without data, there is no telling how many tokens go to which expert."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from shoal.facts.expert_load import crossing
from shoal.facts.layout.expert_nodes import Split
from shoal.models import grouped_product
from shoal.parallel import dispatch, dispatch_by_node


@contextmanager
def balanced() -> Iterator[None]:
    """Every expert and every rank gets equally many tokens, as ``predict`` assumes."""
    with (
        patch.object(grouped_product, "on_host", evenly),
        patch.object(dispatch, "on_host", evenly),
        patch.object(dispatch_by_node, "counts_on_host", evenly_by_node),
    ):
        yield


def evenly(counts: Tensor, rows: int) -> list[list[int]]:
    """Replaces ``grouped_product.on_host``; the first ones get the remainder."""
    ways, parts = counts.shape
    return [_divided(rows, parts)] * ways


def evenly_by_node(
    counts: Tensor, lengths: list[int], split: Split, sizes: list[int], active: int
) -> list[list[list[int]]]:
    """Replaces ``dispatch_by_node.counts_on_host``."""
    found = []
    for tokens in sizes:
        rows = crossing(split.experts, tokens, split.nodes), tokens * active
        found.append([_divided(rows[number // 2], parts) for number, parts in enumerate(lengths)])
    return found


def _divided(rows: int, parts: int) -> list[int]:
    each, more = divmod(rows, parts)
    return [each + (number < more) for number in range(parts)]
