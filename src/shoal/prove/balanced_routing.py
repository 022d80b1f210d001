"""Balanced routing for a dry run: without data, nothing tells how many tokens go to which expert."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from shoal.models import experts
from shoal.parallel import experts as experts_of_ranks


@contextmanager
def balanced() -> Iterator[None]:
    """Every expert and every rank is sent as many tokens as the others; as ``predict`` prices them."""
    with patch.object(experts, "on_host", evenly), patch.object(experts_of_ranks, "on_host", evenly):
        yield


def evenly(counts: Tensor, rows: int) -> list[list[int]]:
    """As ``models.experts.on_host``; the first ones have what does not divide."""
    ways, parts = counts.shape
    each, more = divmod(rows, parts)
    return [[each + (number < more) for number in range(parts)]] * ways
