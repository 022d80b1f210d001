"""The planner's whole answer to one question: plans, losers, the decision in words, cost and curves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from shoal.facts import calibration
from shoal.facts.parameters import active_parameter_count, parameter_count
from shoal.plan import scale
from shoal.plan.asked import Asked
from shoal.plan.decide import Decision, choice, decide
from shoal.plan.explain import against, binds, parts, strategy, why
from shoal.plan.judge import Plan, judge
from shoal.plan.judge import as_json as plan_json
from shoal.plan.remedy import Remedy, for_layout, for_model
from shoal.plan.scale import Cost, Point


@dataclass(frozen=True)
class Answer:
    """``plans`` are best first; a layout that was asked for is alone, whether it fits or not."""

    asked: Asked
    plans: list[Plan]
    rejected: list[tuple[str, str]]  # layout and reason, the nearest first
    searched: int
    evaluated: int  # priced one by one
    at_best: float | None  # where the search was broken off: no layout left out is faster than this
    seconds: float
    decision: Decision
    remedies: list[Remedy]
    over_devices: list[Point]
    over_sequences: list[Point]

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    @property
    def choice(self) -> Plan | None:
        """What the decision says to run."""
        return choice(self.plans) if self.plans else None

    @property
    def unmeasured(self) -> list[str]:
        """What no published run supports, of the plan to run."""
        return self.choice.unmeasured if self.choice else []

    def cost(self, plan: Plan) -> Cost | None:
        asked = self.asked
        return scale.cost(plan, asked.tokens, asked.price) if asked.tokens else None

    def as_json(self) -> dict[str, Any]:
        return _json(self)


def answer(asked: Asked, top: int = 10, curve: bool = False) -> Answer:
    """Everything that ``shoal plan`` says."""
    start = time.perf_counter()
    rejected: list[tuple[str, str]] = []
    searched = evaluated = 1
    at_best: float | None = None
    if asked.layout is not None:
        plans = [judge(asked.question(asked.layout))]
        remedies = [] if plans[0].fits else for_layout(asked, asked.layout)
    else:
        found = scale.searched(asked, top)
        plans, searched, evaluated, at_best = found.plans, found.searched, found.evaluated, found.at_best
        rejected = [(str(loser.layout), loser.reason) for loser in found.rejected]
        remedies = []
        if not plans or not plans[0].fits:
            remedies = for_model(asked)
        elif all(plan.layout.offload for plan in plans):
            remedies = for_model(asked, runnable=True)
    for plan in plans:
        plan.why, plan.called = why(plan), asked.model_name
    decision = decide(asked, plans, remedies)
    return Answer(
        asked,
        plans,
        rejected,
        searched,
        evaluated,
        at_best,
        time.perf_counter() - start,
        decision,
        remedies,
        scale.over_devices(asked) if curve else [],
        scale.over_sequences(asked) if curve else [],
    )


def _json(found: Answer) -> dict[str, Any]:
    asked = found.asked
    model, cluster = asked.model, asked.cluster
    document = {
        "model": {
            "name": model.name,
            "parameters": parameter_count(model),
            "active_parameters": active_parameter_count(model),
        },
        "cluster": {
            "name": str(cluster),
            "device": cluster.device.name,
            "devices": cluster.devices,
            "nodes": cluster.nodes,
            "capacity": cluster.device.memory_bytes,
        },
        "recipe": asked.recipe.model_dump(mode="json"),
        "lora": asked.lora.model_dump(mode="json") if asked.lora else None,
        "decision": vars(found.decision),
        "plans": [_plan(found, plan) for plan in found.plans],
        "rejected": [{"layout": layout, "reason": reason} for layout, reason in found.rejected],
        "remedies": [remedy.as_json() for remedy in found.remedies],
        "unmeasured": found.unmeasured,
        "rates": calibration.find(cluster).words,
        "searched": found.searched,
        "evaluated": found.evaluated,
        "at_best": found.at_best,
        "seconds": found.seconds,
        "choice": str(found.choice.layout) if found.choice else None,
        "tokens": asked.tokens,
        "price": asked.price,
    }
    if found.over_devices or found.over_sequences:
        document["curve"] = {
            "devices": [point.as_json() for point in found.over_devices],
            "sequences": [point.as_json() for point in found.over_sequences],
        }
    return document


def _plan(found: Answer, plan: Plan) -> dict[str, Any]:
    best = found.plans[0]
    total = found.cost(plan)
    return {
        **plan_json(plan),
        "strategy": strategy(plan.layout, plan.question.lora is not None),
        "binds": binds(plan),
        "parts": [vars(part) for part in parts(plan)],
        "against_best": "" if plan is best else against(plan, best),
        "cost": total.as_json() if total else None,
    }
