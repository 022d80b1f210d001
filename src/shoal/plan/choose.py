"""Choose the layout to run: one rule for ``shoal plan``, ``shoal init``, ``layout = "auto"`` and runs that have lost
devices.

There are three answers. The fastest has the lowest predicted time. The simplest is chosen: among layouts that leave
the headroom, all that cannot be told apart from the fastest count as equally fast; of these, in order: the fewest
parts, following published practice, the fewest axes that split the model or its sequences, the best evidence, the
fewest axes, the lowest time. The safest, among the layouts visited that are not much slower, is the least likely to run
out of memory, then has the best evidence, the fewest parts and the most free memory. Offload is used only if nothing
fits without it, or takes much longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.layout import Layout
from shoal.plan import evidence, practice
from shoal.plan.best_first import BestFirst, HuntResult
from shoal.plan.complexity import parts, plain
from shoal.plan.headroom import GIB, UNLIKELY, Headroom, chance, free, free_bytes, out_of_memory
from shoal.plan.judge import RUNS, Plan, Replicas, supported
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.simplest import Simplest, rank_of
from shoal.plan.space import Space, cuts_short
from shoal.plan.time_bound import TimeBound
from shoal.plan.walk import Priced
from shoal.predict.memory import ledger
from shoal.predict.time.step import step
from shoal.predict.workload import Workload

# Effort limit for finding a simpler layout, in bounds (``plan/walk.py``): usually a few tenths of a second; one or two
# seconds on thousands of devices with many ways to share a long pipeline.
EFFORT = 80000
# Number of strategies to choose among, the fastest first.
POOL = 10
# Wording for a claim that no row of ``plan/evidence.py`` supports.
UNCHECKED = "predictions were never checked on"
# The safest may take at most this many times as long as the choice; and times within this ratio are equal.
SLOWEST, SAME = 1.25, 1.005


@dataclass(frozen=True)
class Chosen:
    """The three answers; the first one is run. ``rival``: the fastest layout considered, or the choice itself if
    nothing as fast is simpler. ``headroom``: what all of these leave free.
    """

    plan: Plan
    fastest: Plan
    safest: Plan
    rival: Plan
    headroom: Headroom

    @property
    def simplest(self) -> Plan:
        return self.plan

    @property
    def answers(self) -> dict[str, Plan]:
        return {"simplest": self.simplest, "fastest": self.fastest, "safest": self.safest}

    @property
    def why(self) -> str:
        """The error bar within which it was chosen, and what it saves."""
        rival, within = self.rival, f"its error bar of ±{self.rival.error_bar:.0%}"
        if rival.told_apart < rival.error_bar:
            within = f"the {rival.told_apart:.0%} that predictions cannot tell apart"
        if replicas_only(self.plan.workload.cluster):
            return "On a CPU, every process is a plain replica."
        of_all = "the fastest layout that fits"
        if rival.runs:
            stack = self.plan.workload.stack
            of_all += f" and that {'the engine' if stack is SHOAL else stack.name} runs"
        if rival.layout != self.fastest.layout:
            of_all = f"the fastest layout that {self.headroom}"
            if self.fastest.layout.offload and not rival.layout.offload:
                of_all += " and offloads nothing"
        if self.plan.layout == rival.layout:
            return f"It is {of_all}; no layout within {within} has fewer parts."
        return (
            f"{of_all[0].upper()}{of_all[1:]}, {rival.layout}, is predicted to be {_faster(rival, self.plan)}, "
            f"within {within}; this one {' and '.join(self._better())}."
        )

    @property
    def differ(self) -> list[str]:
        """Why the fastest and the safest differ from the choice, one sentence each."""
        said = []
        fastest, safest = self.fastest, self.safest
        if fastest.layout not in (self.plan.layout, self.rival.layout):
            against = list(self._against(fastest))
            said.append(
                f"Fastest: {fastest.layout}, predicted to be {_faster(fastest, self.plan)}, but "
                f"{' and '.join(against) or 'it has more parts'}."
            )
        if safest.layout != self.plan.layout:
            gains = list(_safer(safest, self.plan))
            said.append(
                f"Safest: {safest.layout}, {_slower(safest, self.plan)}, which "
                f"{' and '.join(gains) or 'has fewer parts'}."
            )
        return said

    def _against(self, fastest: Plan) -> Iterator[str]:
        """Reasons why the fastest of all was not chosen."""
        if not self.headroom.left_by(fastest.memory):
            risk = out_of_memory(fastest.memory)
            out = f" and runs out of memory with a probability of {chance(risk)}" if risk > UNLIKELY else ""
            yield f"it leaves only {free(fastest.memory)}{out}"
        if fastest.layout.offload and not self.plan.layout.offload:
            yield "it offloads what fits on the devices"
        seq, cp = fastest.workload.recipe.seq, fastest.layout.cp
        if cuts_short(seq, cp) and not cuts_short(seq, self.plan.layout.cp):
            yield f"its context ranks have {seq // cp:,} tokens of a sequence each, fewer than any published run's"

    def _better(self) -> Iterator[str]:
        departs = practice.departures(self.rival.workload)
        mine, others = (
            [part for part in _parts(one) if part not in practice.NAMES] for one in (self.plan, self.rival)
        )
        # Replicas are not a part, so a layout with nothing else does not save one.
        if saved := [part for part in others if part not in mine and part not in self.plan.layout.written()]:
            added = [part for part in mine if part not in others]
            instead = f", using {_listed(added)} instead" if added else ""
            yield f"needs no {_listed(saved, 'or')}{instead}"
        if unsure := [claim for claim in self.rival.unmeasured if claim not in self.plan.unmeasured]:
            yield f"does not depend on {_listed(unsure)}, which {UNCHECKED}"
        if better := [name for name in departs if name not in practice.departures(self.plan.workload)]:
            yield f"follows published practice, without {_listed(better)}"
        if len(mine) >= len(others) and not unsure and not better:
            yield "has fewer axes or fewer keys"


def _faster(plan: Plan, other: Plan, word: str = "faster") -> str:
    by = other.step.seconds / plan.step.seconds - 1
    return f"{by:.1%} {word}" if by >= 0.0005 else "equally fast"


def _slower(plan: Plan, other: Plan) -> str:
    return _faster(plan, other) if plan.step.seconds < other.step.seconds else _faster(other, plan, "slower")


def _safer(plan: Plan, other: Plan) -> Iterator[str]:
    """Reasons why one plan is safer than another."""
    risk, more = out_of_memory(plan.memory), out_of_memory(other.memory)
    if chance(risk) != chance(more):
        yield f"runs out of memory with a probability of {chance(risk)} instead of {chance(more)}"
    left, less = (free_bytes(one.memory) for one in (plan, other))
    if left - less > GIB:
        yield f"leaves {left / GIB:.1f} GiB free instead of {less / GIB:.1f}"
    if unsure := [claim for claim in other.unmeasured if claim not in plan.unmeasured]:
        yield f"does not depend on {_listed(unsure)}, which {UNCHECKED}"


def _parts(plan: Plan) -> list[str]:
    return parts(plan.workload)


def _listed(names: Sequence[str], last_word: str = "and") -> str:
    *first, last = names
    return f"{', '.join(first)} {last_word} {last}" if first else last


def replicas_only(cluster: Cluster) -> bool:
    """Whether only replicas make sense: processes on a CPU have no device memory of their own and no links."""
    return cluster.device.name == "cpu"


def choose(
    asked: Workload,
    bounds: TimeBound,
    room: MemoryBound,
    hunts: Sequence[BestFirst],
    others: Sequence[HuntResult],
    against: Replicas,
    simpler: dict[tuple[object, ...], Priced],
) -> Chosen | None:
    """Choose among the results of ``hunts``, and simpler layouts; None if nothing fits. ``others``: hunts beyond what
    may be chosen, for the fastest of all. ``simpler``: already found by an earlier choice on the same hunts.
    """
    if replicas_only(asked.cluster):
        workload = replace(asked, layout=Layout(dp=bounds.devices))
        plan = Plan(workload, ledger(workload), step(workload, bounds.on), against)
        return Chosen(plan, plan, plan, plan, room.headroom)
    # The choice is among a fixed number, however many are shown. A hunt that was cut off may have missed what another
    # has found.
    space = hunts[0].space if hunts else None
    pool = [one for hunt in hunts for one in hunt.accepted[:POOL]]
    pool += [one for hunt in others for one in hunt.accepted[:POOL] if space and _may_be(one, space, room)]
    if not pool:
        return None
    first = min(pool, key=_seconds)
    rival = planned(first, against)
    known = min((one for one in pool if one.step.seconds <= rival.limit), key=rank_of)
    key = hunts[0].space.key, rival.limit, known.candidate
    if key not in simpler:
        simpler[key] = Simplest(asked, bounds, room, hunts[0].space, rival.limit, known).run(EFFORT)
    simplest = simpler[key]
    runs = supported(first.workload) == RUNS
    beyond = (one for hunt in others for one in hunt.accepted[:POOL])
    able = [first, *(one for one in beyond if not runs or supported(one.workload) == RUNS)]
    # The plainest of those that are indistinguishable from the fastest.
    least = SAME * min(map(_seconds, able))
    fastest = min((one for one in (*able, simplest) if one.step.seconds <= least), key=rank_of)
    bearable = (one for one in (*pool, simplest) if one.step.seconds <= SLOWEST * simplest.step.seconds)
    safest = min(bearable, key=_risk)
    plans = [planned(one, against) for one in (simplest, fastest, safest)]
    return Chosen(plans[0], plans[1], plans[2], rival, room.headroom)


def _may_be(one: Priced, space: Space, room: MemoryBound) -> bool:
    """Whether a hunt through this space could have found it."""
    if not space.has(one.candidate) or (space.runnable and supported(one.workload) != RUNS):
        return False
    return room.headroom.left_by(one.memory or ledger(one.workload))


def _seconds(one: Priced) -> float:
    return one.step.seconds


def _risk(one: Priced) -> tuple[bool, int, int, int, float]:
    """Sort key: the least is the safest. Free memory counts in tenths of the total."""
    memory, workload = one.memory or ledger(one.workload), one.workload
    return (
        out_of_memory(memory) > UNLIKELY,
        len(evidence.unmeasured(workload)),
        len(parts(workload)),
        -int(10 * free_bytes(memory) / memory.capacity),
        one.step.seconds,
    )


def planned(one: Priced, against: Replicas) -> Plan:
    """As a plan; a micro-batch equal to the default is not written."""
    workload = one.workload
    bare = replace(workload, layout=plain(workload.layout, workload.recipe.batch))
    return Plan(bare, one.memory or one.too_much or ledger(bare), one.step, against)
