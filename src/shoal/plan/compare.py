"""Several clusters side by side: what a run takes on each, in days, money and energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.plan.amounts import DAY
from shoal.plan.goodput import goodput
from shoal.plan.judge import Plan
from shoal.plan.report import PlanReport
from shoal.plan.scale import Cost


@dataclass(frozen=True)
class Compared:
    """One of several clusters."""

    found: PlanReport

    @property
    def plan(self) -> Plan | None:
        plan = self.found.choice
        return plan if plan is not None and plan.fits else None

    @property
    def cost(self) -> Cost | None:
        return self.found.cost(self.plan) if self.plan else None

    @property
    def tokens_per_day(self) -> float | None:
        """Tokens per day, interruptions included, whether or not the run's length is known."""
        if self.plan is None:
            return None
        lost = goodput(self.plan)
        return self.plan.tokens_per_s * DAY * (lost.share if lost else 1.0)

    def as_json(self) -> dict[str, Any]:
        plan, total = self.plan, self.cost
        return {
            "cluster": str(self.found.asked.cluster),
            "devices": self.found.asked.cluster.devices,
            "fits": plan is not None,
            "layout": str(plan.layout) if plan else None,
            "step_seconds": plan.step.seconds if plan else None,
            "error_bar": plan.error_bar if plan else None,
            "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu if plan else None,
            "mfu": plan.mfu if plan else None,
            "tokens_per_day": self.tokens_per_day,
            "days": total.days if total else None,
            "gpu_hours": total.gpu_hours if total else None,
            "cost": total.cost if total else None,
            "kwh": total.kwh if total else None,
        }


def best_of(rows: list[Compared]) -> list[str]:
    """Sentences naming the fastest, the cheapest and the most energy-efficient cluster; none for unknown quantities."""
    fits = [row for row in rows if row.plan is not None]
    said = []
    if fits:
        fastest = max(fits, key=lambda row: row.tokens_per_day or 0.0)
        said.append(f"fastest: {fastest.found.asked.cluster}")
    for word, name in (("cheapest", "cost"), ("least energy", "kwh")):
        known = [
            (getattr(row.cost, name), row) for row in fits if row.cost and getattr(row.cost, name) is not None
        ]
        if known and len(known) == len(fits):
            said.append(f"{word}: {min(known, key=lambda pair: pair[0])[1].found.asked.cluster}")
    return said
