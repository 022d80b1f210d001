"""Choose the layout to run: one rule for ``shoal plan``, ``shoal init``, ``layout = "auto"`` and runs that have lost
devices.

Three answers stand side by side. The fastest is the one that is predicted to be. The simplest is what is chosen: of
the layouts that leave the headroom, all that cannot be told apart from the fastest is as fast; of these the one with
the fewest parts, then the one that follows published practice, then the one that leaves the model and its sequences
whole along the most axes, then the one on the best evidence, then the one with the fewest axes, then the fastest. The
safest, of those that were found on the way and are not much slower, hardly ever runs out of memory, rests on the best
evidence, has the fewest parts and leaves the most memory. Something is offloaded only where nothing fits without, or
takes much longer.
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

# Work that looking for a simpler layout takes at most, in bounds (``plan/walk.py``): a few tenths of a second as
# a rule; on thousands of devices that share a long pipeline in many ways, one or two.
EFFORT = 80000
# Strategies that the choice is made among, the fastest first.
POOL = 10
# Said of a claim that no row of ``plan/evidence.py`` supports.
UNCHECKED = "predictions were never checked on"
# The safest takes at most so many times as long as what is chosen; and what differs by less than this is equally fast.
SLOWEST, SAME = 1.25, 1.005


@dataclass(frozen=True)
class Chosen:
    """The three answers, the first of which is run. ``rival``: the fastest of those that it was chosen among, itself
    where nothing as fast is simpler. ``headroom``: what all of these leave free.
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
        """Within which error bar, and what it saves."""
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
        """Why the fastest and the safest are others than what is chosen, in a sentence each."""
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
        """What keeps the fastest of all from being chosen."""
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
        # Replicas are no part by themselves, and yet not saved where they are all there is.
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
    """What makes one plan safer than another."""
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
    """Processes on a CPU are replicas: what they may hold is no device's memory, and their links are no links."""
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
    """Among what ``hunts`` have found, and what is simpler than that; None where nothing fits. ``others``: those that
    went beyond what may be chosen, for the fastest of all. ``simpler``: found by an earlier choice from the same, and
    not searched for again.
    """
    if replicas_only(asked.cluster):
        workload = replace(asked, layout=Layout(dp=bounds.devices))
        plan = Plan(workload, ledger(workload), step(workload, bounds.on), against)
        return Chosen(plan, plan, plan, plan, room.headroom)
    # However many are shown, the choice is made among as many. A hunt that was broken off may have missed what another
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
    # Of those that are as fast as the fastest, to all that can be seen, the plainest.
    least = SAME * min(map(_seconds, able))
    fastest = min((one for one in (*able, simplest) if one.step.seconds <= least), key=rank_of)
    bearable = (one for one in (*pool, simplest) if one.step.seconds <= SLOWEST * simplest.step.seconds)
    safest = min(bearable, key=_risk)
    plans = [planned(one, against) for one in (simplest, fastest, safest)]
    return Chosen(plans[0], plans[1], plans[2], rival, room.headroom)


def _may_be(one: Priced, space: Space, room: MemoryBound) -> bool:
    """Whether it could have been found by a hunt through this space."""
    if not space.has(one.candidate) or (space.runnable and supported(one.workload) != RUNS):
        return False
    return room.headroom.left_by(one.memory or ledger(one.workload))


def _seconds(one: Priced) -> float:
    return one.step.seconds


def _risk(one: Priced) -> tuple[bool, int, int, int, float]:
    """The least of these is the safest. Free memory counts in tenths of what there is."""
    memory, workload = one.memory or ledger(one.workload), one.workload
    return (
        out_of_memory(memory) > UNLIKELY,
        len(evidence.unmeasured(workload)),
        len(parts(workload)),
        -int(10 * free_bytes(memory) / memory.capacity),
        one.step.seconds,
    )


def planned(one: Priced, against: Replicas) -> Plan:
    """As a plan; a micro-batch that it would have anyway is not written."""
    workload = one.workload
    bare = replace(workload, layout=plain(workload.layout, workload.recipe.batch))
    return Plan(bare, one.memory or one.too_much or ledger(bare), one.step, against)
