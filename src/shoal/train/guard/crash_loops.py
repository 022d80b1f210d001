"""Crash loops: whether to restart a failed run, and from which commit. Needs no torch.

External faults go away with a restart. Internal ones repeat: the same step fails again, or no step completes after the
same commit was restored. The decision is a function of the failures so far and the existing commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# After this many failures in the same step, without a new commit in between, another try would fail too.
SAME_STEP = 3
# After this many failures right after restoring the same commit, before one step completed, it is not used again.
SAME_COMMIT = 2
# Kinds of faults that say nothing about the program or the restored state: a user, a machine, a network.
FROM_OUTSIDE = ("killed", "connection", "stall", "node lost")

CORRUPTION, OUT_OF_MEMORY = "corruption", "oom"


@dataclass(frozen=True)
class FailedAttempt:
    """How one attempt at a run ended."""

    resumed: int  # the step of the commit it resumed from; 0 for the start
    reached: int  # the last completed step; ``resumed`` if there is none
    kind: str = "crash"  # of the fault
    rank: int | None = None  # the suspected rank
    message: str = ""
    trusted: int | None = None  # commits of later steps may be wrong; None: all are fine
    set_aside: tuple[int, ...] = ()  # decided at that time

    def row(self) -> dict[str, Any]:
        """A row of faults.jsonl, with the step that was not completed."""
        return {
            "kind": self.kind,
            "step": self.reached + 1,
            "resumed_step": self.resumed,
            "reached_step": self.reached,
            "rank": self.rank,
            "message": self.message,
            "trusted_step": self.trusted,
            "set_aside": list(self.set_aside),
        }


@dataclass(frozen=True)
class RestartDecision:
    """What to do next. A commit that is set aside is renamed and kept, and not resumed from."""

    again: bool
    set_aside: tuple[int, ...] = ()
    why: str = ""


def decide(failures: Sequence[FailedAttempt], commits: Sequence[int], most: int) -> RestartDecision:
    """Decide after the last of these failures, with these steps committed: restart, and from where?

    ``most``: restarts without any progress (``fault.max_restarts``).
    """
    assert failures, "nothing has failed"
    last = failures[-1]
    if culprit := _same_culprit(failures, most):
        return RestartDecision(False, why=culprit)
    if last.kind == OUT_OF_MEMORY and last.reached == last.resumed:
        # The very first step ran out of memory: the next attempt's would too.
        return RestartDecision(False)
    without_progress = _since_progress(failures, commits)
    if len(without_progress) > most:
        times = _times(len(without_progress))
        return RestartDecision(
            False, why=f"failed {times} without a new commit (fault.max_restarts = {most})"
        )
    doubtful = tuple(step for step in sorted(commits) if last.trusted is not None and step > last.trusted)
    if doubtful:
        # The initial state is always good, so no commit may remain at all.
        why = f"nothing after step {last.trusted} is known to be sound"
        return RestartDecision(True, doubtful, f"{_steps(doubtful)} set aside: {why}")
    return _same_step(without_progress) or _same_commit(without_progress, commits) or RestartDecision(True)


def _since_progress(failures: Sequence[FailedAttempt], commits: Sequence[int]) -> Sequence[FailedAttempt]:
    """The failures since the run last made progress: the first failure there and all later ones without a new commit.

    Committing again a step that was set aside is not progress.
    """
    last = failures[-1]
    sound = [step for step in commits if last.trusted is None or step <= last.trusted]
    found_after = [*(one.resumed for one in failures[1:]), max(sound, default=0)]
    known = first = 0
    for number, (one, newest) in enumerate(zip(failures, found_after, strict=True)):
        known = max(known, one.resumed)
        if newest > known:
            first = number
        known = max(known, newest, *one.set_aside)
    return failures[first:]


def _same_culprit(failures: Sequence[FailedAttempt], most: int) -> str:
    """Why not to restart: one rank's memory or device was found faulty more often than restarts are allowed,
    whatever happened in between. Empty otherwise.
    """
    last = failures[-1]
    times = sum(one.kind == CORRUPTION and one.rank == last.rank for one in failures)
    if last.kind != CORRUPTION or last.rank is None or times <= most:
        return ""
    return f"rank {last.rank} corrupted its state {_times(times)}: its memory or device is broken"


def _same_step(failures: Sequence[FailedAttempt]) -> RestartDecision | None:
    reached = failures[-1].reached
    times = sum(one.reached == reached and one.kind not in FROM_OUTSIDE for one in failures)
    if times < SAME_STEP:
        return None
    return RestartDecision(
        False, why=f"failed {_times(times)} in step {reached + 1}, with no new commit between"
    )


def _same_commit(failures: Sequence[FailedAttempt], commits: Sequence[int]) -> RestartDecision | None:
    last = failures[-1]
    same = [
        one for one in failures if one.reached == one.resumed == last.resumed and one.kind not in FROM_OUTSIDE
    ]
    if last.reached > last.resumed or last.resumed == 0 or len(same) < SAME_COMMIT:
        return None
    times = f"{_times(len(same))} right after restoring step {last.resumed}"
    if any(one.resumed in one.set_aside for one in failures):
        # Another commit has been tried: whatever is wrong, it is not the commit.
        return RestartDecision(False, why=f"failed {times}, as it did after a later one, which was set aside")
    before = [step for step in commits if step < last.resumed]
    if not before:
        return RestartDecision(False, why=f"failed {times}, and there is no commit before it")
    why = f"step {last.resumed} set aside: failed {times}; the one before, step {max(before)}, is used"
    return RestartDecision(True, (last.resumed,), why)


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
