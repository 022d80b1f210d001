"""Choose the layout to run: one rule for ``shoal plan``, ``layout = "auto"`` and runs that have lost devices.

Of the layouts within the error bar of the fastest, the one with the fewest parts, then the one on the best evidence,
then the one with the fewest axes, then the fastest. What the engine does not run is chosen only where nothing that it
runs fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.layout import Layout
from shoal.plan.best_first import BestFirst, Priced
from shoal.plan.complexity import parts, plain
from shoal.plan.judge import Plan, Replicas
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.simplest import Simplest, rank_of
from shoal.plan.time_bound import TimeBound
from shoal.predict.memory import ledger
from shoal.predict.time.step import step
from shoal.predict.workload import Workload

# Work that looking for a simpler layout takes at most, in bounds (``plan/best_first.py``): a few tenths of a second.
EFFORT = 10000
# Strategies that the choice is made among, the fastest first.
POOL = 10


@dataclass(frozen=True)
class Chosen:
    """A layout to run, and the fastest that it was chosen over: itself, where nothing as fast is simpler."""

    plan: Plan
    fastest: Plan

    @property
    def slower(self) -> float:
        return self.plan.step.seconds / self.fastest.step.seconds - 1

    @property
    def why(self) -> str:
        """Within which error bar, and what it saves."""
        fastest, within = self.fastest, f"its error bar of ±{self.fastest.error_bar:.0%}"
        stack = self.plan.workload.stack
        of_all = (
            f"the fastest layout that fits and that {'the engine' if stack is SHOAL else stack.name} runs"
            if fastest.runs
            else "the fastest layout that fits"
        )
        if replicas_only(self.plan.workload.cluster):
            return "On a CPU, every process is a plain replica."
        if self.plan.layout == fastest.layout:
            return f"It is {of_all}; no layout within {within} has fewer parts."
        faster = f"{self.slower:.1%} faster" if self.slower >= 0.0005 else "equally fast"
        return (
            f"{of_all[0].upper()}{of_all[1:]}, {fastest.layout}, is predicted to be {faster}, within {within}; "
            f"this one {' and '.join(self._better())}."
        )

    def _better(self) -> Iterator[str]:
        mine, others = _parts(self.plan), _parts(self.fastest)
        # Replicas are no part by themselves, and yet not saved where they are all there is.
        if saved := [part for part in others if part not in mine and part not in self.plan.layout.written()]:
            added = [part for part in mine if part not in others]
            instead = f", using {_listed(added)} instead" if added else ""
            yield f"needs no {_listed(saved, 'or')}{instead}"
        if unsure := [claim for claim in self.fastest.unmeasured if claim not in self.plan.unmeasured]:
            yield f"does not depend on {_listed(unsure)}, which no published run has measured"
        if len(mine) >= len(others) and not unsure:
            yield "has fewer axes or fewer keys"


def _parts(plan: Plan) -> list[str]:
    return parts(plan.workload)


def _listed(names: Sequence[str], last_word: str = "and") -> str:
    *first, last = names
    return f"{', '.join(first)} {last_word} {last}" if first else last


def replicas_only(cluster: Cluster) -> bool:
    """Processes on a CPU are replicas: what they may hold is no device's memory, and their links are no links."""
    return cluster.device.name == "cpu"


def choose(
    asked: Workload, bounds: TimeBound, room: MemoryBound, hunts: Sequence[BestFirst], against: Replicas
) -> Chosen | None:
    """Among what these have found, and what is simpler than that; None where nothing fits."""
    if replicas_only(asked.cluster):
        workload = replace(asked, layout=Layout(dp=bounds.devices))
        plan = Plan(workload, ledger(workload), step(workload, bounds.on), against)
        return Chosen(plan, plan)
    # However many are shown, the choice is made among as many.
    pool = [one for hunt in hunts for one in hunt.accepted[:POOL]]
    if not pool:
        return None
    fastest = planned(min(pool, key=lambda one: one.step.seconds), against)
    known = min((one for one in pool if one.step.seconds <= fastest.limit), key=rank_of)
    simplest = Simplest(asked, bounds, room, hunts[0].space, fastest.limit, known).run(EFFORT)
    return Chosen(planned(simplest, against), fastest)


def planned(one: Priced, against: Replicas) -> Plan:
    """As a plan; a micro-batch that it would have anyway is not written."""
    workload = one.workload
    bare = replace(workload, layout=plain(workload.layout, workload.recipe.batch))
    return Plan(bare, one.memory or ledger(bare), one.step, against)
