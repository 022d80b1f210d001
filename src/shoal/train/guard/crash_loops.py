"""Crash loops: whether to restart a failed run, and from which commit. Needs no torch.

Faults that come from outside are over after a restart. Those that are not look alike: the same step again, or no step
at all after the same commit was restored. What is decided is a function of the failures so far and the commits there
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Failures in the same step, no new commit between them, after which it will not go differently.
SAME_STEP = 3
# Failures right after restoring the same commit, before one step was done, after which that commit is not used.
SAME_COMMIT = 2
# Kinds that say nothing of the program or of what it has restored: a user, a machine, a network.
FROM_OUTSIDE = ("killed", "connection", "stall", "node lost")

CORRUPTION, OUT_OF_MEMORY = "corruption", "oom"


@dataclass(frozen=True)
class FailedAttempt:
    """How one attempt at a run ended."""

    resumed: int  # the step whose commit it began from; 0 where it began at the beginning
    reached: int  # the last step that it completed; ``resumed`` where it completed none
    kind: str = "crash"  # of the fault
    rank: int | None = None  # whose fault it looked like
    message: str = ""
    trusted: int | None = None  # commits of later steps may be wrong; None: nothing casts doubt on them
    set_aside: tuple[int, ...] = ()  # what was decided then

    def row(self) -> dict[str, Any]:
        """As a row of faults.jsonl. It has the step that was not completed."""
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
    """What comes next. A commit that is set aside is kept, under another name, and not continued from."""

    again: bool
    set_aside: tuple[int, ...] = ()
    why: str = ""


def decide(failures: Sequence[FailedAttempt], commits: Sequence[int], most: int) -> RestartDecision:
    """After the last of these failures, with these steps committed: go on, and from where?

    ``most``: restarts without any progress (``fault.max_restarts``).
    """
    assert failures, "nothing has failed"
    last = failures[-1]
    if culprit := _same_culprit(failures, most):
        return RestartDecision(False, why=culprit)
    if last.kind == OUT_OF_MEMORY and last.reached == last.resumed:
        # The very first step found no room: the next attempt's would not either.
        return RestartDecision(False)
    without_progress = _since_progress(failures, commits)
    if len(without_progress) > most:
        times = _times(len(without_progress))
        return RestartDecision(
            False, why=f"failed {times} without a new commit (fault.max_restarts = {most})"
        )
    doubtful = tuple(step for step in sorted(commits) if last.trusted is not None and step > last.trusted)
    if doubtful:
        # The beginning is always sound, so this may leave no commit at all.
        why = f"nothing after step {last.trusted} is known to be sound"
        return RestartDecision(True, doubtful, f"{_steps(doubtful)} set aside: {why}")
    return _same_step(without_progress) or _same_commit(without_progress, commits) or RestartDecision(True)


def _since_progress(failures: Sequence[FailedAttempt], commits: Sequence[int]) -> Sequence[FailedAttempt]:
    """The failures since the run last came further: the first of them, and all without a new commit in between.

    A commit that was set aside and is made once more is no progress.
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
    """A rank whose memory or device was found wrong more often than workers may be restarted, whatever came between."""
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
        # It has been tried with another one: whatever is wrong, it is not the commit.
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
