"""When workers are started again, and when that is given up."""

from __future__ import annotations

from shoal.launch.failure import Failure
from shoal.launch.restart import Restarts


def failure(kind: str = "killed", rank: int = 0, final: bool = False) -> Failure:
    return Failure(rank, "something", False, 0.0, kind=kind, final=final)


def test_progress_renews_the_budget() -> None:
    restarts = Restarts(budget=2)
    for step in range(50):
        assert restarts.judge(failure(), step).again
    assert restarts.judge(failure(), 49).again
    last = restarts.judge(failure(), 49)
    assert not last.again and "3 failures without a new commit" in last.why


def test_an_error_of_the_program_is_tried_once_more() -> None:
    restarts = Restarts(budget=5)
    assert restarts.judge(failure("error", 1), 7).again
    assert restarts.judge(failure("error", 0), 7).again
    assert not restarts.judge(failure("error", 1), 7).again
    assert restarts.judge(failure("error", 1), 8).again


def test_what_would_come_again_is_not_tried_again() -> None:
    assert not Restarts(budget=5).judge(failure("input", final=True), 3).again
    assert not Restarts(budget=0).judge(failure(), 3).again
