"""The time that a process waits for others, and no other time."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.observe.waits import Waits, timed_waits


def wait_for_a_late_rank(rank: int, world: int) -> tuple[float, bool]:
    waits = Waits()
    before = vars(dist.Work)["wait"]
    with timed_waits(waits):
        time.sleep(0.2 * rank)
        dist.all_reduce(torch.ones(1))
    counted = waits.seconds
    time.sleep(0.2 * rank)
    dist.all_reduce(torch.ones(1))
    assert waits.seconds == counted
    return counted, vars(dist.Work)["wait"] is before


def test_waits_are_timed() -> None:
    (early, restored), (late, _) = run_ranks(2, wait_for_a_late_rank)
    assert early > 0.15
    assert late < 0.1
    assert restored
