"""Work is handed out in order, up to a limit, and what a lost worker had goes to the next that asks."""

from __future__ import annotations

from shoal.parallel.server import END, EVALUATE, TRAIN
from shoal.train.server.items import WorkQueue


def test_in_order_up_to_the_limit() -> None:
    work = WorkQueue(4)
    assert work.take(0) is None
    work.limit = 6
    assert [work.take(0), work.take(1), work.take(0)] == [(TRAIN, 4), (TRAIN, 5), None]


def test_a_lost_workers_item_comes_first_and_once() -> None:
    work = WorkQueue(0)
    work.limit = 4
    assert work.take(0) == (TRAIN, 0) and work.take(1) == (TRAIN, 1)
    assert work.lost(0) == (TRAIN, 0) and work.lost(0) is None
    work.done(1)
    assert work.lost(1) is None
    assert [work.take(1), work.take(1), work.take(1)] == [(TRAIN, 0), (TRAIN, 2), (TRAIN, 3)]


def test_an_evaluation_and_the_end() -> None:
    work = WorkQueue(0)
    work.evaluate(range(2))
    assert work.take(0) == (EVALUATE, 0)
    work.lost(0)
    assert [work.take(1), work.take(2), work.take(1)] == [(EVALUATE, 0), (EVALUATE, 1), None]
    work.ended = True
    assert work.take(1) == (END, 0)
