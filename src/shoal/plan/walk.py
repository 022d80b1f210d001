"""The base of every search through the layout space: its priority queue, and the memory checks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from shoal.facts.layout import Offload
from shoal.facts.ledger import Ledger
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.more_offload import LIGHTER, removable
from shoal.plan.space import Candidate, ModelSplit, PipelineOrder, RankWork, Space, StateSharding, placed
from shoal.plan.time_bound import TimeBound
from shoal.predict.memory import ledger
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload

# Effort is counted in bounds of about 30 microseconds, not in seconds, so that a workload has the same answer on every
# machine. These are the costs of pricing a whole layout, of its ledger, and of simulating a pipeline for that.
PRICED = 25
COUNTED, PLAYED = 20, 4
# A layout whose memory bound is at most this share of a device usually fits.
ROOMY = 0.8
# Degrees of tp, cp, pp, ep; what data ranks shard; whether anything is offloaded.
StrategyKey = tuple[int, int, int, int, int, bool]


@dataclass(slots=True)
class Priced:
    """A whole layout with its exact time, and later its memory."""

    candidate: Candidate
    workload: Workload
    step: StepTime
    memory: Ledger | None = None
    too_much: Ledger | None = None  # of a rank that did not fit, if no other was checked

    @property
    def strategy(self) -> StrategyKey:
        split, share, _, states, _ = self.candidate
        return strategy_of(split, share, states)


@dataclass(eq=False)
class Walk:
    """The base of every search: its priority queue, and the memory checks.

    ``known``: priced layouts, shared by all searches of one request.
    """

    asked: Workload
    bounds: TimeBound
    room: MemoryBound
    space: Space
    known: dict[Candidate, Priced] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        self._heap: list[tuple[Any, int, Any]] = []
        self._number = count()
        self._worked = 0
        self._failed: dict[tuple[object, ...], int] = {}

    def _push(self, bound: Any, item: Any) -> None:
        self._worked += 1
        heapq.heappush(self._heap, (bound, next(self._number), item))

    def _states(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, alike: Sequence[StateSharding]
    ) -> Iterator[tuple[StateSharding, float]]:
        """Shardings that may fit, each with a lower bound on the step time. Fewer ranks need more memory."""
        worked = None
        for states in alike:
            self._worked += 1
            if not self.room.holds(split, share, order, states):
                return
            if states.offload and not self.room.has_place(split, share, order, states):
                return
            if worked is None:
                worked = self._worked_at_least(split, share, order, states)
            yield states, self.bounds.of_states(split, share, order, states, worked)

    def _worked_at_least(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, states: StateSharding
    ) -> float:
        """The bound of an order, plus the weights that these states move."""
        held = self.bounds.handled(split, share, states)
        return self.bounds.of_order(split, share, order, held)

    def _may_hold(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, offload: tuple[Offload, ...]
    ) -> bool:
        return self.room.may_hold(split, share, order, offload)

    def _priced(self, candidate: Candidate) -> Priced:
        priced = self.known.get(candidate)
        if priced is None:
            workload = replace(self.asked, layout=candidate.layout())
            self._worked += PRICED
            priced = self.known[candidate] = Priced(candidate, workload, step(workload, self.bounds.on))
        return priced

    def _memory(self, priced: Priced) -> Ledger:
        if priced.memory is None:
            self._worked += COUNTED + PLAYED * (priced.workload.layout.pp * priced.workload.layout.chunks - 1)
            priced.memory = ledger(priced.workload)
        return priced.memory

    def _known_to_fit(self, priced: Priced) -> bool:
        """Whether its exact ledger fits; stops at the first rank that does not."""
        left = self.room.headroom.left_by
        if priced.memory is None:
            if priced.too_much is not None and not left(priced.too_much):
                return False
            if self._too_large_anyway(priced.candidate):
                return False
            self._worked += COUNTED + PLAYED * (priced.workload.layout.pp * priced.workload.layout.chunks - 1)
            found = ledger(priced.workload, left)
            if not left(found):
                priced.too_much = found
                return False
            priced.memory = found
        return left(priced.memory)

    def _too_large_anyway(self, candidate: Candidate) -> bool:
        """Whether it would not fit even with all offloaded states gone, judged by a layout that offloads less."""
        for lighter in LIGHTER.get(candidate.states.offload, ()):
            kept = self.known.get(candidate._replace(states=candidate.states._replace(offload=lighter)))
            memory = kept and (kept.memory or kept.too_much)
            if memory:
                gone = removable(candidate, lighter, memory)
                if not self.room.fits(candidate.split, memory.peak_allocated - gone):
                    return True
        return False

    def _too_large(self, candidate: Candidate) -> bool:
        """Whether something that needs no more memory did not fit."""
        return candidate.states.fsdp <= self._failed.get(self._alike(candidate), 0)

    def _fits(self, priced: Priced) -> bool:
        """Check the memory; if it does not fit, neither do states over fewer ranks, or larger units."""
        candidate, alike = priced.candidate, self._alike(priced.candidate)
        fits = self._known_to_fit(priced)
        if not fits and alike[-1] == candidate.unit:
            self._failed[alike] = max(candidate.states.fsdp, self._failed.get(alike, 0))
        return fits

    def _tight(self, candidate: Candidate, frugal: StateSharding) -> bool:
        """Whether even the most frugal states may not fit. Otherwise the ledger, which is slow, is computed only for
        what turns out to be the fastest.
        """
        split, share, order, *_ = candidate
        return not self.room.fits(split, self.room.of_states(split, share, order, frugal) / ROOMY)

    def _alike(self, candidate: Candidate) -> tuple[object, ...]:
        """A key that is equal for layouts that differ only in the number of ranks that shard states, and in units. Its
        last part is the unit that needs the least memory; if small units stay gathered, it may be any. Unsharded
        experts are not gathered, so with fewer ranks these may need less.
        """
        split, share, order, states, unit = candidate
        least = unit if self.asked.tune.persist_below else 1
        ranks = states.fsdp if share.ep > 1 else 0
        return split, share, order, strategy_of(split, share, states)[4], states.offload, ranks, least


def strategy_of(split: ModelSplit, share: RankWork, states: StateSharding) -> StrategyKey:
    shared = states.zero if placed(split, states).sharded.size > 1 else 0
    return split.tp, split.cp, split.pp, share.ep, shared, bool(states.offload)
