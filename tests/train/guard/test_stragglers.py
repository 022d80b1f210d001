"""Who is slow: found in real processes that wait for each other, and by arithmetic."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.facts.layout import Layout
from shoal.parallel.mesh import Mesh
from shoal.train.guard.stragglers import AGAIN_SECONDS, IN_A_ROW, LEAST_SECONDS, WINDOW, Stragglers, slower

FACTOR = 2.0
# Sleeping stands for computing: it takes equally long however many processes share these cores.
WORK = 0.01


def work_together(rank: int, world: int, layout: str, extra: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Steps with a first sum, gradients that are summed while others are computed, and a last sum.

    ``extra``: seconds that each rank takes longer, by when in a step.
    """
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    rows = []
    with Stragglers(mesh, FACTOR) as stragglers:
        for step in range(1, (IN_A_ROW + 1) * WINDOW + 1):
            stragglers.begin()
            time.sleep(extra["input"][rank])
            mesh.hosts.sum_integers([1, 0])
            time.sleep(WORK)
            time.sleep(extra["compute"][rank])
            work = dist.all_reduce(torch.ones(100), async_op=True)
            assert work is not None
            work.wait()
            mesh.hosts.sum_floats([1.0, 1.0])
            stragglers.end()
            if (row := stragglers.compare(step)) is not None:
                rows.append(row)
    return rows


@pytest.mark.parametrize("when", ["input", "compute"])
def test_one_rank_that_is_slow_is_named(when: str) -> None:
    slow = {"input": [0.0] * 3, "compute": [0.0] * 3, when: [0.0, 0.0, 0.02]}
    first, *others = run_ranks(3, work_together, "dp=3", slow)
    assert others == [[], []]
    # Named once, and not again twenty steps later.
    (row,) = first
    assert (row["kind"], row["step"], row["ranks"]) == ("straggler", IN_A_ROW * WINDOW, [2])
    assert row["seconds"][0] > FACTOR * row["peers_seconds"][0] > WORK
    assert row["action"].startswith("rank 2 takes ")


def test_nobody_is_named_where_all_are_alike() -> None:
    even = {"input": [0.005] * 3, "compute": [0.005] * 3}
    assert run_ranks(3, work_together, "dp=3", even) == [[], [], []]


def test_stages_of_a_pipeline_are_not_compared() -> None:
    uneven = {"input": [0.0] * 2, "compute": [0.0, 0.02]}
    assert run_ranks(2, work_together, "pp=2", uneven) == [[], []]


def test_who_is_slower() -> None:
    alike = [0] * 5
    assert slower([0.10, 0.11, 0.09, 0.10, 0.12], alike, FACTOR) == {}
    assert slower([0.10, 0.11, 0.30, 0.10, 0.25], alike, FACTOR) == {2: 0.11, 4: 0.11}
    # Of two the faster is the measure, and of one nothing is.
    assert slower([0.1, 0.21], [0, 0], FACTOR) == {1: 0.1}
    assert slower([0.1, 0.21], [0, 1], FACTOR) == {}
    # Each stage has its own.
    assert slower([0.1, 0.1, 0.1, 0.9, 0.9, 1.9], [0, 0, 0, 1, 1, 1], FACTOR) == {5: 0.9}
    # Twice as long, and still nothing that anybody would notice.
    assert slower([LEAST_SECONDS / 9, LEAST_SECONDS], [0, 0], FACTOR) == {}
    assert slower([0.0, 0.0, 1.0], [0, 0, 0], FACTOR) == {2: 0.0}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_told_once_an_hour_and_when_another_is_slow() -> None:
    clock = Clock()
    mesh = Mesh(Layout.parse("dp=1"), 0, torch.device("cpu"))
    stragglers = Stragglers(mesh, FACTOR, clock)
    stragglers.peers = [0, 0, 0]

    def named(*busy: float) -> list[int]:
        clock.now += 60.0
        row = stragglers._news(100, busy)
        return [] if row is None else row["ranks"]

    assert named(1, 1, 1) == []
    # Not before it is slow for long.
    assert [named(1, 1, 3) for _ in range(IN_A_ROW)] == [*[[]] * (IN_A_ROW - 1), [2]]
    assert named(1, 1, 3) == []
    assert named(1, 1, 1) == []
    assert [named(1, 1, 3) for _ in range(IN_A_ROW)] == [[]] * IN_A_ROW
    assert [named(3, 1, 1) for _ in range(IN_A_ROW)][-1] == [0]
    clock.now += AGAIN_SECONDS
    assert [named(1, 1, 3) for _ in range(IN_A_ROW)][-1] == [2]


def test_slow_now_and_then_is_not_slow() -> None:
    stragglers = Stragglers(Mesh(Layout.parse("dp=1"), 0, torch.device("cpu")), FACTOR)
    stragglers.peers = [0, 0, 0]
    for _ in range(5):
        assert [stragglers._news(100, busy) for busy in [(1, 1, 3)] * (IN_A_ROW - 1)] == [None] * (
            IN_A_ROW - 1
        )
        assert stragglers._news(100, (1, 1, 1)) is None


def test_a_single_slow_step_is_nothing() -> None:
    """Of the last steps the median counts."""
    clock = Clock()
    stragglers = Stragglers(Mesh(Layout.parse("dp=1"), 0, torch.device("cpu")), FACTOR, clock)
    for step in range(WINDOW):
        stragglers.begin()
        clock.now += 50.0 if step == 7 else 0.1
        stragglers.end()
    assert sorted(stragglers._busy)[WINDOW // 2] == pytest.approx(0.1)
    assert stragglers.compare(WINDOW) is None  # alone there is nobody to compare with
