"""A block of the layout space: every layout of one split whose shares differ only in the micro-batch.

A search bounds a block as a whole, in columns: first its orders, then, of those that may be fast enough, what they
offload, and then who keeps which states. What is left is a list of layouts, each with how long a step takes at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.facts.layout import RECOMPUTES
from shoal.plan import complexity, evidence
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.pipelines import Columns
from shoal.plan.space import (
    Candidate,
    ModelSplit,
    PipelineOrder,
    WorkShare,
    has_activations,
    placed,
)
from shoal.plan.state_columns import StateColumns, StateTables
from shoal.plan.time_bound import Rows, TimeBound

# Bounds are sums in another order than what they bound.
ROUNDING = 1 - 1e-9
Places = NDArray[Any]


class Complexities(NamedTuple):
    """What speaks against layouts, as ``plan/simplest.py`` weighs it."""

    parts: Places
    unmeasured: Places
    keys: Places
    axes: Places


class Found(NamedTuple):
    """Layouts of a block but for their units, in columns."""

    rows: Rows
    states: StateColumns
    seconds: Columns  # of a step, at least

    def at(self, places: Places | NDArray[np.bool_]) -> Found:
        return Found(Rows._make(column[places] for column in self.rows), self.states, self.seconds[places])


@dataclass
class Block:
    split: ModelSplit
    shares: list[WorkShare]
    bounds: TimeBound
    batch: int

    def __post_init__(self) -> None:
        self.least = (
            float(self.bounds.of_orders(self.split, self.shares, again=False).seconds.min()) * ROUNDING
        )
        share, split = self.shares[0], self.split
        self.parts = complexity.of_split(split) + complexity.of_share(share)
        self.unmeasured = _doubts(evidence.of_share(split.cp, share.cp_kind, share.ep))
        self.axes = sum(degree > 1 for degree in split) + (share.ep > 1)

    @cached_property
    def seconds(self) -> Columns:
        """By share, by what is computed again, by pipeline."""
        return self.bounds.of_orders(self.split, self.shares).seconds * ROUNDING

    @property
    def size(self) -> int:
        return len(self.shares) * len(self.bounds.pipelines(self.split.pp).names)

    def order(self, recompute: int, pipeline: int) -> PipelineOrder:
        schedule, chunks = self.bounds.pipelines(self.split.pp).names[pipeline]
        return PipelineOrder(schedule, chunks, RECOMPUTES[recompute])

    @cached_property
    def of_orders(self) -> tuple[Places, Places]:
        """Parts and claims without evidence that an order adds: by share, recomputation and pipeline."""
        names, pp = self.bounds.pipelines(self.split.pp).names, self.split.pp
        policies = np.zeros(self.seconds.shape[1:], dtype=np.intp)
        doubts = np.zeros_like(policies)
        usual = []
        for column, (schedule, _) in enumerate(names):
            usual.append(complexity.usual_micro(self.split, self.order(0, column), self.batch))
            for row, again in enumerate(RECOMPUTES):
                doubts[row, column] = _doubts(evidence.of_order(pp, schedule, again))
                policies[row, column] = complexity.of_policies(self.order(row, column))
        unusual = np.array([share.micro for share in self.shares])[:, None] != np.array(usual)
        parts = policies + unusual[:, None]
        return parts, np.broadcast_to(doubts, parts.shape)

    def candidate(self, found: Found, number: int, unit: int) -> Candidate:
        share, recompute, pipeline, states = (int(column[number]) for column in found.rows)
        order = self.order(recompute, pipeline)
        return Candidate(self.split, self.shares[share], order, found.states.states[states], unit)

    def open(
        self, orders: NDArray[np.bool_], room: MemoryBound, tables: StateTables, limit: float
    ) -> Found | None:
        """Layouts of these orders that may fit and take no more seconds than ``limit``; None where there are none."""
        split, shares, ep = self.split, self.shares, self.shares[0].ep
        place = np.nonzero(orders & (self.seconds <= limit))
        frugal, states = tables.frugal(split, ep), tables.every(split, ep)
        allowed = np.array([[has_activations(one, again) for one in frugal.offloads] for again in RECOMPUTES])
        greatest = [frugal.greatest(of_order) for of_order in allowed]
        everything = np.zeros_like(allowed)
        for again, number in enumerate(greatest):
            everything[again] = allowed[again] if number is None else np.arange(allowed.shape[1]) == number
        # With states shared out as far as they can be: with everything offloaded, then with what may be.
        for offloaded in (everything, allowed):
            if not len(place[0]):
                return None
            row, column = np.nonzero(offloaded[place[1]][:, frugal.owner])
            rows = Rows._make((*(axis[row] for axis in place), column))
            fits = room.of_states(split, shares, rows, frugal, least=True) <= room.most(split)
            row, column = row[fits], column[fits]
            if len(np.unique(row)) < len(place[0]):
                kept, row = np.unique(row, return_inverse=True)
                place = tuple(axis[kept] for axis in place)
        rows = Rows._make((*(axis[row] for axis in place), column))
        if not len(row):
            return None
        fast = self.bounds.of_states(split, shares, rows, frugal, exchanged=False) * ROUNDING <= limit
        pairs = np.unique(row[fast] * len(frugal.offloads) + frugal.owner[column[fast]])
        row, chosen = np.divmod(pairs, len(frugal.offloads))
        # And who keeps which states.
        pair, column = np.nonzero(chosen[:, None] == states.owner)
        rows = Rows._make((*(axis[row[pair]] for axis in place), column))
        if not len(pair):
            return None
        seconds = self.bounds.of_states(split, shares, rows, states) * ROUNDING
        fast = seconds <= limit
        rows, seconds = Rows._make(axis[fast] for axis in rows), seconds[fast]
        if not len(seconds):
            return None
        fits = room.of_states(split, shares, rows, states) <= room.most(split)
        fits &= room.of_host(split, shares, rows, states) <= room.host
        rows, seconds = Rows._make(axis[fits] for axis in rows), seconds[fits]
        return Found(rows, states, seconds) if len(seconds) else None

    def counted(self, found: Found) -> Complexities:
        """What speaks against each of these."""
        split, share, states = self.split, self.shares[0], found.states
        of_states = np.array(
            [
                (
                    complexity.of_states(split, share, one),
                    _doubts(
                        evidence.of_states(one.dp, placed(split, one).sharded.size, one.zero, one.offload)
                    ),
                    one.dp > 1 and one.fsdp > 1,
                    complexity.replicas_alone(split, share, one),
                )
                for one in states.states
            ],
            dtype=np.intp,
        )[found.rows.states]
        parts, doubts = self.of_orders
        place = found.rows[:3]
        return Complexities(
            self.parts + parts[place] + of_states[:, 0],
            self.unmeasured + doubts[place] + of_states[:, 1],
            of_states[:, 3],
            self.axes + of_states[:, 2],
        )


def _doubts(claims: list[str]) -> int:
    return sum(claim not in evidence.ROWS for claim in claims)
