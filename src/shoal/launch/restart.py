"""Whether workers are started again after a failure. The budget is for failures without any progress between them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.launch.failure import CONNECTION, CRASHED, KILLED, Failure

# Failures of the machine or of somebody's hand, which may well come again at the same step and mean nothing.
FROM_OUTSIDE = (KILLED, CRASHED, CONNECTION, "stall")


class GaveUp(Exception):
    """The run has failed for good."""

    def __init__(self, failure: Failure, why: str) -> None:
        self.failure = failure
        super().__init__(f"{failure}{f'; {why}' if why else ''}")


@dataclass(frozen=True)
class Decision:
    again: bool
    why: str = ""


class Restarts:
    """Counts failures since the run last came further."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.reached = -1
        self.since: list[Failure] = []

    def judge(self, failure: Failure, reached: int) -> Decision:
        """``reached``: the last step that is safe, on disk or in memory."""
        if reached > self.reached:
            self.reached, self.since = reached, []
        self.since.append(failure)
        if failure.final:
            return Decision(False)
        same = [one for one in self.since if one.kind == failure.kind and one.rank == failure.rank]
        if failure.kind not in FROM_OUTSIDE and len(same) > 1:
            return Decision(False, "the same again after a restart")
        if len(self.since) > self.budget:
            times = f"{len(self.since)} failures" if self.budget else "no restart is allowed"
            return Decision(False, f"{times} without a new commit (fault.max_restarts = {self.budget})")
        return Decision(True)
