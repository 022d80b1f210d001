"""Whether to restart workers after a failure, and from which checkpoint."""

from __future__ import annotations

from dataclasses import replace

from shoal.launch.failure import Failure
from shoal.parallel.signed_store import SignedStore
from shoal.train.files import last_row
from shoal.train.guard.crash_loops import FailedAttempt, RestartDecision, decide
from shoal.train.outcome import RESUMED, TRUSTED
from shoal.train.run_directory import RunDirectory


class GaveUp(Exception):
    """The run has failed for good."""

    def __init__(self, failure: Failure, why: str) -> None:
        self.failure = failure
        super().__init__(f"{failure}{f'; {why}' if why else ''}")


class Interrupted(Exception):
    """Stopped while no workers were running: by the user or, as its text says, because nodes are missing."""


class Restarts:
    """The failures of one launch. Counting starts anew with each launch: a user who restarts a run has changed
    something.
    """

    def __init__(self, run: RunDirectory, budget: int) -> None:
        self.run, self.budget = run, budget
        self.failures: list[FailedAttempt] = []

    def judge(self, failure: Failure, attempt: SignedStore) -> tuple[RestartDecision, FailedAttempt]:
        """Decide what follows the attempt that this failure has ended."""
        commits = sorted({*self.run.disk.committed(), *self.run.memory().committed()})
        resumed = _told(attempt, RESUMED)
        if resumed is None:  # the attempt did not get that far
            resumed = reached = max(commits, default=0)
        else:
            row = last_row(self.run.metrics)
            reached = max(resumed, row["step"] if row else 0)
        trusted = _told(attempt, TRUSTED)
        failed = FailedAttempt(resumed, reached, failure.kind, failure.rank, failure.message, trusted)
        self.failures.append(failed)
        if failure.final:
            return RestartDecision(False), failed
        decision = decide(self.failures, commits, self.budget)
        # Later decisions depend on it.
        self.failures[-1] = replace(failed, set_aside=decision.set_aside)
        return decision, self.failures[-1]


def _told(store: SignedStore, key: str) -> int | None:
    text = store.read(key)
    return None if text is None else int(text)
