"""Crash loops: when a run is started again, from which commit, and when it is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.train.files import read_rows
from shoal.train.guard.crash_loops import CORRUPTION, FailedAttempt, RestartDecision, decide
from shoal.train.run_directory import RunDirectory

PLENTY = 100


def history(*attempts: tuple[FailedAttempt, Sequence[int]], most: int = PLENTY) -> list[RestartDecision]:
    """What is decided after each failure, with the commits there are then; each knows what was decided before."""
    failures: list[FailedAttempt] = []
    decisions = []
    for failed, commits in attempts:
        decisions.append(decide([*failures, failed], commits, most))
        failures.append(replace(failed, set_aside=decisions[-1].set_aside))
    return decisions


def test_one_failure_is_no_loop() -> None:
    for failed in (
        FailedAttempt(0, 0),
        FailedAttempt(0, 7),
        FailedAttempt(100, 100),
        FailedAttempt(100, 150),
    ):
        assert decide([failed], [100], 3) == RestartDecision(True)


def test_no_restart_is_allowed() -> None:
    decision = decide([FailedAttempt(0, 150)], [100], 0)
    assert not decision.again
    assert "fault.max_restarts = 0" in decision.why


def test_the_same_step_three_times() -> None:
    attempts = [
        (FailedAttempt(0, 149), [100]),
        (FailedAttempt(100, 149), [100]),
        (FailedAttempt(100, 149), [100]),
    ]
    first, second, third = history(*attempts)
    assert first.again and second.again
    assert third == RestartDecision(False, why="failed 3 times in step 150, with no new commit between")


def test_different_steps_are_no_loop_until_the_budget_is_spent() -> None:
    failures = [FailedAttempt(100, step) for step in (150, 140, 160, 155)]
    decisions = history(*((failed, [100]) for failed in failures), most=3)
    assert [decision.again for decision in decisions] == [True, True, True, False]
    assert decisions[-1].why == "failed 4 times without a new commit (fault.max_restarts = 3)"


def test_a_new_commit_starts_the_count_anew() -> None:
    # A fault a day for a month: each attempt commits something, and the budget is 1.
    attempts = [
        (FailedAttempt(100 * day, 100 * day + 149), [100 * day, 100 * (day + 1)]) for day in range(30)
    ]
    assert all(decision.again for decision in history(*attempts, most=1))
    # The first failure after a commit counts: two more without one.
    spent = [*attempts, (FailedAttempt(3000, 3040), [2900, 3000])]
    assert not history(*spent, most=1)[-1].again


def test_a_failure_with_progress_and_two_without_are_three_in_the_same_step() -> None:
    attempts = [
        (FailedAttempt(100, 249), [100, 200]),  # it made the commit of step 200
        (FailedAttempt(200, 249), [100, 200]),
        (FailedAttempt(200, 249), [100, 200]),
    ]
    assert [decision.again for decision in history(*attempts)] == [True, True, False]


def test_a_commit_that_nothing_starts_from_is_set_aside() -> None:
    first, second = history((FailedAttempt(200, 200), [100, 200]), (FailedAttempt(200, 200), [100, 200]))
    assert first == RestartDecision(True)
    assert second.again and second.set_aside == (200,)
    assert second.why == (
        "step 200 set aside: failed twice right after restoring step 200; the one before, step 100, is used"
    )


def test_what_comes_from_outside_speaks_against_no_commit() -> None:
    for kind in ("killed", "stall", "connection"):
        attempts = [(FailedAttempt(200, 200, kind), [100, 200])] * 3
        assert all(decision == RestartDecision(True) for decision in history(*attempts, most=3)), kind


def test_memory_that_the_first_step_did_not_find_the_next_attempt_will_not_find_either() -> None:
    assert not history((FailedAttempt(200, 200, "oom"), [200]))[0].again
    assert history((FailedAttempt(200, 230, "oom"), [200]))[0].again


def test_one_completed_step_speaks_for_the_commit() -> None:
    decisions = history((FailedAttempt(200, 200), [100, 200]), (FailedAttempt(200, 201), [100, 200]))
    assert decisions[-1] == RestartDecision(True)


def test_an_earlier_failure_elsewhere_does_not_count_against_the_commit() -> None:
    # Once right after 100, then progress, then once right after 200.
    attempts = [
        (FailedAttempt(100, 100), [100]),
        (FailedAttempt(100, 250), [100, 200]),
        (FailedAttempt(200, 200), [100, 200]),
    ]
    assert all(decision == RestartDecision(True) for decision in history(*attempts))


def test_the_beginning_cannot_be_set_aside() -> None:
    attempts = [(FailedAttempt(0, 0), [])] * 3
    first, second, third = history(*attempts)
    assert first.again and second.again and not second.set_aside
    assert third == RestartDecision(False, why="failed 3 times in step 1, with no new commit between")


def test_the_only_commit_is_not_given_up() -> None:
    decision = history((FailedAttempt(200, 200), [200]), (FailedAttempt(200, 200), [200]))[-1]
    assert decision == RestartDecision(
        False, why="failed twice right after restoring step 200, and there is no commit before it"
    )


def test_commits_are_not_set_aside_one_after_another() -> None:
    stillborn = [(FailedAttempt(300, 300), [100, 200, 300])] * 2 + [(FailedAttempt(200, 200), [100, 200])] * 2
    decisions = history(*stillborn)
    assert [decision.again for decision in decisions] == [True, True, True, False]
    assert decisions[1].set_aside == (300,)
    assert "as it did after a later one" in decisions[-1].why


def test_a_step_that_crashes_is_told_from_a_commit_that_does() -> None:
    # Step 201 kills the run, and the commit of step 200 was not to blame.
    attempts = [
        (FailedAttempt(200, 200), [100, 200]),
        (FailedAttempt(200, 200), [100, 200]),
        (FailedAttempt(100, 200), [100, 200]),  # 200 was made once more, which is no progress
    ]
    decisions = history(*attempts)
    assert decisions[1].set_aside == (200,)
    assert decisions[2] == RestartDecision(
        False, why="failed 3 times in step 201, with no new commit between"
    )


def test_commits_in_doubt_are_set_aside() -> None:
    corrupted = FailedAttempt(0, 250, CORRUPTION, rank=1, trusted=100)
    (decision,) = history((corrupted, [100, 200, 250]))
    assert decision == RestartDecision(
        True, (200, 250), "steps 200, 250 set aside: nothing after step 100 is known to be sound"
    )
    # Also all of them: the beginning is sound.
    (decision,) = history((replace(corrupted, trusted=0), [200]))
    assert decision.again and decision.set_aside == (200,)
    # And none, where none is in doubt.
    assert decide([corrupted], [50, 100], 3) == RestartDecision(True)


def test_a_commit_in_doubt_is_no_progress() -> None:
    corrupted = [
        FailedAttempt(100, 250 + number, CORRUPTION, rank=number, trusted=100) for number in range(3)
    ]
    decisions = history(*((failed, [100, 200]) for failed in corrupted), most=2)
    assert [decision.again for decision in decisions] == [True, True, False]


def test_a_rank_that_is_found_wrong_again_and_again() -> None:
    # With progress every time.
    attempts = [
        (
            FailedAttempt(100 * number, 100 * number + 150, CORRUPTION, rank=2, trusted=100 * number + 100),
            [100 * number + 100],
        )
        for number in range(3)
    ]
    decisions = history(*attempts, most=2)
    assert [decision.again for decision in decisions] == [True, True, False]
    assert decisions[-1].why == "rank 2 corrupted its state 3 times: its memory or device is broken"
    assert all(decision.again for decision in history(*attempts, most=3))
    others = [(replace(failed, rank=number), commits) for number, (failed, commits) in enumerate(attempts)]
    assert all(decision.again for decision in history(*others))


def test_failures_are_rows_of_the_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    failures = [
        FailedAttempt(200, 249, "killed", 3, "killed by SIGKILL"),
        FailedAttempt(200, 200, CORRUPTION, 1, "memory changed", trusted=100, set_aside=(200,)),
    ]
    run.note_fault(**failures[0].row())
    run.note_fault(kind="nonfinite", step=201, action="update skipped")
    run.note_fault(**failures[1].row())
    rows = [row for row in read_rows(run.faults) if "reached_step" in row]
    assert [(row["resumed_step"], row["reached_step"], row["step"]) for row in rows] == [
        (200, 249, 250),
        (200, 200, 201),
    ]
    assert [(row["trusted_step"], row["set_aside"]) for row in rows] == [(None, []), (100, [200])]


def test_there_is_nothing_to_decide_without_a_failure() -> None:
    with pytest.raises(AssertionError, match="nothing has failed"):
        decide([], [], 3)
