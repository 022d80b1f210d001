"""Deadline and budget: whether a plan meets them or, if the run's length is open, what they are enough for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shoal.facts.model.parameters import active_parameter_count
from shoal.plan import compute_optimal
from shoal.plan.amounts import HOUR, short
from shoal.plan.decide import duration
from shoal.plan.goodput import goodput
from shoal.plan.judge import Plan
from shoal.plan.scale import Cost

Kept = Literal["kept", "missed", "uncertain"]


@dataclass(frozen=True)
class Verdict:
    """A limit, and how much of it a run takes."""

    what: Literal["deadline", "budget"]
    limit: float  # seconds, or money
    takes: float
    error_bar: float

    @property
    def verdict(self) -> Kept:
        if self.takes * (1 + self.error_bar) <= self.limit:
            return "kept"
        return "missed" if self.takes * (1 - self.error_bar) > self.limit else "uncertain"

    @property
    def text(self) -> str:
        show = duration if self.what == "deadline" else "{:,.0f}".format
        word = {"kept": "kept", "missed": "missed", "uncertain": "within the error bar, so it may be missed"}
        return (
            f"{self.what} of {show(self.limit)}: {word[self.verdict]}; "
            f"the run {'takes' if self.what == 'deadline' else 'costs'} {show(self.takes)} ± {self.error_bar:.0%}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "limit": self.limit,
            "takes": self.takes,
            "error_bar": self.error_bar,
            "verdict": self.verdict,
            "text": self.text,
        }


def verdicts(plan: Plan, total: Cost, deadline: float | None, budget: float | None) -> list[Verdict]:
    """Verdicts on the given limits; a budget needs a price."""
    found = []
    if deadline is not None:
        found.append(Verdict("deadline", deadline, total.seconds, plan.error_bar))
    if budget is not None and total.cost is not None:
        found.append(Verdict("budget", budget, total.cost, plan.error_bar))
    return found


@dataclass(frozen=True)
class Affordable:
    """What a deadline or a budget is enough for, if the run's length was left open."""

    seconds: float
    tokens: float
    flops: float  # at six per parameter and token
    error_bar: float

    @property
    def text(self) -> str:
        parameters, tokens = compute_optimal.split(self.flops)
        return (
            f"enough for {short(self.tokens)} tokens ± {self.error_bar:.0%} in {duration(self.seconds)}; "
            f"the compute-optimal model for that compute: {short(parameters)} parameters on {short(tokens)} tokens "
            f"({compute_optimal.FIT})"
        )

    def as_json(self) -> dict[str, Any]:
        parameters, tokens = compute_optimal.split(self.flops)
        return {
            **vars(self),
            "compute_optimal": {"parameters": parameters, "tokens": tokens},
            "text": self.text,
        }


def affordable(
    plan: Plan, deadline: float | None, budget: float | None, price: float | None
) -> Affordable | None:
    """The smaller of what both allow; None if neither was given."""
    seconds = [deadline] if deadline is not None else []
    if budget is not None and price is not None:
        seconds.append(budget / price / plan.world * HOUR)
    if not seconds:
        return None
    lost = goodput(plan)
    tokens = plan.tokens_per_s * min(seconds) * (lost.share if lost else 1.0)
    flops = 6.0 * active_parameter_count(plan.workload.model) * tokens
    return Affordable(min(seconds), tokens, flops, plan.error_bar)
