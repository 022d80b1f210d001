"""Judge an export as its target will really run it: another layout, other kernels, other stored states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal.facts.layout import Layout, divisors
from shoal.facts.layout.legality import Case, broken
from shoal.facts.layout.stack_limits import RULES, runs
from shoal.facts.problem import BadInput
from shoal.plan.explain import GIB, lacks
from shoal.plan.export import Exported, export
from shoal.plan.headroom import UNLIKELY, chance, free
from shoal.plan.judge import Plan, asked_of, judge
from shoal.plan.search import searched
from shoal.predict.workload import Workload


@dataclass(frozen=True)
class Rejudged:
    """An export compared with the plan it was made from."""

    target: str
    planned: Plan
    there: Plan
    warning: str = ""  # why another layout was written, or what this one risks there

    @property
    def words(self) -> str:
        """What the target runs, in one line."""
        memory, before = self.there.memory, self.planned.memory
        return (
            f"{self.target} runs it as {self.there.layout}: {self.there.step.seconds:.3g} s/step, "
            f"{memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f} GiB (planned: "
            f"{self.planned.step.seconds:.3g} s/step, {before.device_p90 / GIB:.1f} GiB)"
        )

    def as_json(self) -> dict[str, Any]:
        memory = self.there.memory
        return {
            "stack": self.there.workload.stack.name,
            "layout": str(self.there.layout),
            "fits": self.there.fits,
            "device_p90": memory.device_p90,
            "capacity": memory.capacity,
            "step_seconds": self.there.step.seconds,
            "warning": self.warning,
        }


def rejudged(target: str, planned: Plan, free: bool = False) -> tuple[Exported, Rejudged]:
    """An export, and its prediction on the target. ``free``: another layout may replace one that does not fit there.

    Raises ``BadInput`` with the nearest runnable layout if the target would not run it, or would run out of memory.
    """
    exported = export(target, planned.workload)
    if planned.workload.lora is not None and exported.runs_as.lora is None:
        raise BadInput(
            f"--export {target}: what Shoal writes for it trains all weights, not adapters",
            "--export deepspeed or --export accelerate, whose script adds adapters with peft",
        )
    there = judge(exported.runs_as)
    refused = there.lacks if there.workload.stack.name in RULES and not there.runs else ""
    if there.fits and not refused:
        return exported, Rejudged(target, planned, there, _at_the_edge(target, planned, there))
    what = f"as {target} runs it, {there.layout} does not fit: {lacks(there.memory)}"
    if refused:
        what = f"{target} does not run {there.layout} ({refused})"
    found = nearest_that_fits(exported.runs_as)
    if found is None:
        raise BadInput(
            f"--export {target}: {what}", "more GPUs, or another stack: nothing that it runs fits here"
        )
    if free:
        instead = export(target, replace(planned.workload, layout=found.layout))
        warning = f"{what}; in its place {found.layout} was written"
        return instead, Rejudged(target, planned, judge(instead.runs_as), warning)
    memory = found.memory
    raise BadInput(
        f"--export {target}: {what}",
        f"--layout {found.layout} ({memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f} GiB, "
        f"{found.step.seconds:.3g} s/step there)",
    )


def _at_the_edge(target: str, planned: Plan, there: Plan) -> str:
    """A warning where the export runs out of memory more often than the plan that it was made from."""
    if there.out_of_memory <= max(UNLIKELY, planned.out_of_memory):
        return ""
    warning = (
        f"as {target} runs it, {there.layout} leaves {free(there.memory)} and runs out of memory with a probability of "
        f"{chance(there.out_of_memory)}"
    )
    found = nearest_that_fits(there.workload, UNLIKELY)
    if found is None:
        return warning
    return f"{warning}; {found.layout} leaves {free(found.memory)}, {found.step.seconds:.3g} s/step there"


def nearest_that_fits(workload: Workload, risk: float = 1.0) -> Plan | None:
    """The fastest layout with the same degrees that fits within ``risk``; otherwise the best one that the stack runs.

    ``risk``: the highest probability of running out of memory.
    """
    fitting = [
        plan for other in _neighbours(workload) if (plan := judge(other)).fits and plan.out_of_memory <= risk
    ]
    if fitting:
        return min(fitting, key=lambda plan: plan.step.seconds)
    if workload.stack.name not in RULES:
        return None
    chosen = searched(replace(workload, layout=Layout()), 1).chosen
    return chosen.plan if chosen else None


def _neighbours(workload: Workload) -> Iterator[Workload]:
    """Smaller micro-batches, more recomputation, more sharding."""
    layout = workload.layout
    for micro in divisors(workload.micro):
        for recompute in ("none", "selective", "full"):
            for zero in range(layout.zero, 4) if layout.shards > 1 else (layout.zero,):
                other = layout.replace(micro=micro, recompute=recompute, zero=zero)
                moved = replace(workload, layout=other)
                legal = next(broken(Case.of(other, workload.model, workload.recipe)), None) is None
                if legal and runs(workload.stack.name, asked_of(moved)):
                    yield moved
