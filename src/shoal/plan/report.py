"""The planner's complete answer: plans, runners-up, the decision in words, cost and curves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoal.facts import calibration
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.layout import Layout
from shoal.facts.model.parameters import active_parameter_count, parameter_count
from shoal.facts.problem import BadInput
from shoal.plan import scale, search
from shoal.plan.choose import Chosen
from shoal.plan.compute_optimal import ComputeOptimal, tokens_for
from shoal.plan.deadline import Affordable, Verdict, affordable, verdicts
from shoal.plan.decide import Decision, decide, not_run
from shoal.plan.explain import against, binds, parts, strategy, why
from shoal.plan.how_many import HowMany, how_many
from shoal.plan.judge import Plan, engine_runs, judge
from shoal.plan.judge import as_json as plan_json
from shoal.plan.measurement import Measurement, decisive
from shoal.plan.remedy import Remedy, for_layout, for_model, on_these
from shoal.plan.request import PlanRequest, plan_request
from shoal.plan.scale import Cost, Point


@dataclass(frozen=True)
class PlanReport:
    """``plans``: fastest first, the chosen one included; a requested layout alone, whether it fits or not."""

    asked: PlanRequest
    plans: list[Plan]
    chosen: Chosen | None  # None if nothing runnable fits, or the layout was given
    rejected: list[tuple[str, str]]  # layout and reason, nearest first
    searched: int
    evaluated: int  # layouts priced one by one
    at_best: float | None  # if the search was cut off: seconds that no unvisited layout can beat
    proven: bool  # no layout in the space is faster than the first plan
    seconds: float
    decision: Decision
    remedies: list[Remedy]
    over_devices: list[Point]
    over_sequences: list[Point]
    number: HowMany | None = None  # device count, if that was the question or a deadline needs another
    measurement: Measurement | None = None  # the measurement that would change the decision

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    @property
    def choice(self) -> Plan | None:
        """The plan that the decision says to run; a requested layout in any case."""
        return self.chosen.plan if self.chosen else self.best

    @property
    def nothing_runs(self) -> bool:
        """Whether something fits, but nothing that the engine runs."""
        return self.chosen is None and self.asked.layout is None and self.best is not None

    @property
    def unmeasured(self) -> list[str]:
        """What no published run supports about the plan to run."""
        return self.choice.unmeasured if self.choice else []

    def cost(self, plan: Plan) -> Cost | None:
        asked = self.asked
        return scale.cost(plan, asked.tokens, asked.price) if asked.tokens else None

    @property
    def verdicts(self) -> list[Verdict]:
        """Whether the plan to run meets the deadline and the budget."""
        plan, asked = self.choice, self.asked
        total = self.cost(plan) if plan and plan.fits else None
        return verdicts(plan, total, asked.deadline, asked.budget) if plan and total else []

    @property
    def affordable(self) -> Affordable | None:
        """What a deadline and a budget are enough for, if the run's length was left open."""
        plan, asked = self.choice, self.asked
        if plan is None or not plan.fits or asked.tokens is not None:
            return None
        return affordable(plan, asked.deadline, asked.budget, asked.price)

    @cached_property
    def optimal(self) -> ComputeOptimal:
        """The model and its tokens compared with compute-optimal training."""
        size = active_parameter_count(self.asked.model)
        return ComputeOptimal(size, tokens_for(size), self.asked.tokens)

    def as_json(self) -> dict[str, Any]:
        return _json(self)


def plan(
    model: Any,
    on: Any,
    *,
    seq: int | None = None,
    batch: int | None = None,
    top: int = 10,
    curve: bool = False,
    **others: Any,
) -> PlanReport:
    """The answer of ``shoal plan``. ``others``: layout, lora, tokens, price, deadline, budget, and fields of a
    recipe."""
    return plan_report(plan_request(model, on, seq=seq, batch=batch, **others), top, curve)


def plan_report(asked: PlanRequest, top: int = 10, curve: bool = False) -> PlanReport:
    """Everything that ``shoal plan`` says."""
    number = None
    if not asked.counted:
        number = how_many(asked)
        if number is None:
            raise BadInput(
                f"--on {asked.cluster.device.name}: no number of them does",
                "a longer deadline, or more memory each",
            )
        asked = number.asked
    start = time.perf_counter()
    rejected: list[tuple[str, str]] = []
    searched = evaluated = 1
    at_best: float | None = None
    proven = False
    chosen: Chosen | None = None
    if asked.layout is not None:
        plans = [judge(asked.workload(asked.layout))]
        remedies = [] if plans[0].fits else for_layout(asked, asked.layout)
    else:
        # How much is searched must not depend on how much is shown.
        found = search.searched(asked.workload(Layout()), max(top, search.TOP), headroom=asked.headroom)
        searched, evaluated, at_best, chosen = found.searched, found.evaluated, found.at_best, found.chosen
        proven = found.proven
        plans = _shown(found.plans, chosen, top)
        # If the engine runs nothing that fits, nothing is chosen, because it could not be trained.
        unrun = chosen is not None and not chosen.plan.runs and asked.stack is SHOAL
        able = not unrun or engine_runs(asked.workload(Layout()))
        chosen = None if unrun else chosen
        rejected = [(str(loser.layout), loser.reason) for loser in found.rejected]
        remedies = []
        if chosen is None:
            remedies = for_model(asked, runnable=unrun) if able else []
        elif chosen.plan.layout.offload:
            remedies = on_these(asked, resting=True)
    for plan in plans:
        plan.why, plan.called = why(plan), asked.model_name
    decision = decide(asked, plans, chosen, remedies)
    return PlanReport(
        asked,
        plans,
        chosen,
        rejected,
        searched,
        evaluated,
        at_best,
        proven,
        time.perf_counter() - start,
        decision,
        remedies,
        scale.over_devices(asked) if curve else [],
        scale.over_sequences(asked) if curve else [],
        number or _enough(asked, chosen.plan if chosen else None),
        decisive(chosen, plans) if chosen else None,
    )


def _enough(asked: PlanRequest, plan: Plan | None) -> HowMany | None:
    """The device count that would meet the deadline, if this plan misses it."""
    if plan is None or asked.tokens is None or asked.deadline is None:
        return None
    total = scale.cost(plan, asked.tokens, asked.price)
    (late,) = verdicts(plan, total, asked.deadline, None)
    return how_many(asked) if late.verdict == "missed" else None


def _shown(plans: list[Plan], chosen: Chosen | None, top: int) -> list[Plan]:
    """The fastest plans, with the chosen one in its place among them."""
    if chosen is None:
        return plans[:top]
    mine = chosen.plan
    others = [plan for plan in plans if plan.layout != mine.layout]
    mine.tie = not plans or mine.step.seconds <= plans[0].limit
    return sorted([*others[: top - 1], mine], key=lambda plan: plan.step.seconds)


def _json(found: PlanReport) -> dict[str, Any]:
    asked = found.asked
    model, cluster = asked.model, asked.cluster
    document: dict[str, Any] = {
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
        "stack": asked.stack.name,
        "lora": asked.lora.model_dump(mode="json") if asked.lora else None,
        "decision": found.decision.as_json(),
        "plans": [_plan(found, plan) for plan in found.plans],
        "rejected": [{"layout": layout, "reason": reason} for layout, reason in found.rejected],
        "remedies": [remedy.as_json() for remedy in found.remedies],
        "unmeasured": found.unmeasured,
        "rates": calibration.find(cluster).words,
        "searched": found.searched,
        "evaluated": found.evaluated,
        "at_best": found.at_best,
        "proven": found.proven,
        "seconds": found.seconds,
        "chosen": _chosen(found),
        "choice": str(found.choice.layout) if found.choice else None,
        "tokens": asked.tokens,
        "price": asked.price,
        "how_many": found.number.as_json() if found.number else None,
        "deadline": None,
        "budget": None,
        "measurement": found.measurement.as_json() if found.measurement else None,
        "affordable": found.affordable.as_json() if found.affordable else None,
        "compute_optimal": found.optimal.as_json(),
    }
    for each in found.verdicts:
        document[each.what] = each.as_json()
    if found.over_devices or found.over_sequences:
        document["curve"] = {
            "devices": [point.as_json() for point in found.over_devices],
            "sequences": [point.as_json() for point in found.over_sequences],
        }
    return document


def _chosen(found: PlanReport) -> dict[str, Any]:
    """What ``layout = "auto"`` trains, if the engine runs it."""
    chosen = found.chosen
    if chosen is None:
        plan = found.best if found.asked.layout and found.best and found.best.fits else None
        layout = str(plan.layout) if plan else None
        why = "It is the layout you asked for." if plan else found.decision.text
        names = dict.fromkeys(("simplest", "fastest", "safest"), layout)
        return {"layout": layout, "why": why, **names, "runs": plan is not None and plan.runs}
    return {
        "layout": str(chosen.plan.layout),
        "why": " ".join([chosen.why, *not_run(chosen.plan, found.plans)]),
        **{name: str(plan.layout) for name, plan in chosen.answers.items()},
        "runs": chosen.plan.runs,
        "differ": chosen.differ,
        "headroom": chosen.headroom.bytes(chosen.plan.memory.capacity),
        "answers": {name: plan_json(plan) for name, plan in chosen.answers.items()},
    }


def _plan(found: PlanReport, plan: Plan) -> dict[str, Any]:
    best = found.plans[0]
    total = found.cost(plan)
    return {
        **plan_json(plan),
        "strategy": strategy(plan.layout, plan.workload.lora),
        "binds": binds(plan),
        "parts": [vars(part) for part in parts(plan)],
        "against_best": "" if plan is best else against(plan, best),
        "cost": total.as_json() if total else None,
    }
