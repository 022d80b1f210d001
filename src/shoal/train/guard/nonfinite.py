"""Keep non-finite gradients from the weights: skip, retry or stop, as configured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # launchers read this module too
    from shoal.train.step import StepResult

# fp16 lowers its scale for a few steps at the start; more than this in a row means a run that learns nothing.
MOST_IN_A_ROW = 20

SKIPPED = "update skipped"


class NonFinite(Exception):
    """The run stops here; the last commit is from before the trouble."""


class NonFiniteGuard:
    """Judges each step's outcome by the policy ``skip``, ``retry`` or ``stop``.

    It judges the norm of the reduced gradients, so all ranks reach the same verdict without communicating.
    """

    def __init__(self, policy: str, scaled: bool) -> None:
        self.policy = policy
        self.scaled = scaled  # fp16: overflows are how its loss scale adapts, not faults
        self.in_a_row = 0
        self.found: StepResult | None = None  # the last step's first attempt, if it was not finite

    def judge(
        self, step: int, result: StepResult, again: Callable[[], StepResult] | None = None
    ) -> StepResult:
        """``again`` repeats the step, as the policy ``retry`` needs."""
        self.found = None if _finite(result) or self.scaled else result
        if not _finite(result) and self.policy == "retry" and not self.scaled:
            # Same data and weights: if the result is finite now, the hardware was the cause and not the data.
            assert again is not None
            result = again()
        if _finite(result):
            self.in_a_row = 0
            return result
        self.in_a_row += 1
        if self.scaled or self.policy == "skip":
            if self.in_a_row > MOST_IN_A_ROW:
                raise NonFinite(f"step {step}: gradients were not finite for {self.in_a_row} steps in a row")
            return result
        found = "again " if self.policy == "retry" else ""
        whose = _whose(result.blamed)
        raise NonFinite(
            f"step {step}: the gradient{whose} is {found}not finite (fault.nonfinite = {self.policy!r})"
        )

    def told(self, step: int, result: StepResult) -> dict[str, Any] | None:
        """A row of faults.jsonl about the last step, if there is something to report."""
        if self.found is None:
            return None
        action = SKIPPED
        if result.updated:
            action = "tried again, and finite: it was the machine and not the data"
        blamed = self.found.blamed
        return {
            "kind": "nonfinite",
            "step": step,
            "ranks": list(blamed),
            "action": action,
            "message": f"the gradient{_whose(blamed)} was not finite",
        }


def _finite(result: StepResult) -> bool:
    """Whether a step was finite; its update may have been refused for another reason."""
    return math.isfinite(result.grad_norm)


def _whose(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return ""
    return f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
