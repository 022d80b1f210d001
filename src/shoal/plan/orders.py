"""All layouts of a space, without their states, in the order in which they may be fast.

All hunts through a space share one such list (``plan/best_first.py``), which grows on demand: the speed of a split, a
work share, recomputation and order does not depend on the headroom or on offload.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import inf
from typing import NamedTuple

from shoal.facts.layout import RECOMPUTES, Offload, Recompute, Zero, accumulation
from shoal.plan.exchange_bound import ZEROS
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.space import NOTHING, ModelSplit, PipelineOrder, RankWork, Space
from shoal.plan.time_bound import TimeBound

# Effort spent at once on the next group of a list.
AT_ONCE = 500
# The cost of pricing a new share, in bounds.
PRICED_SHARE = 4


@dataclass(eq=False)
class OrderGroup:
    """The orders of one share with the same recomputation; a step takes at least ``seconds`` in any of them."""

    seconds: float
    split: ModelSplit
    share: RankWork
    orders: list[PipelineOrder]
    bounds: TimeBound
    counted: bool = False  # whether a hunt has looked at them

    @cached_property
    def ordered(self) -> list[tuple[float, PipelineOrder]]:
        """Each order with a lower bound on its step time."""
        bound = self.bounds.of_order
        return [(bound(self.split, self.share, order) + self.exchanged, order) for order in self.orders]

    @cached_property
    def exchanged(self) -> float:
        """The bound including data ranks' exchange."""
        return self.of_stage(*ZEROS)

    def of_stage(self, *zeros: Zero) -> float:
        """The same, once it is known what data ranks shard."""
        compiled = self.bounds.compiled(self.split, self.orders[0])
        return self.bounds.of_exchange(self.split, self.share, self.orders, zeros, compiled)


class OpenGroup(NamedTuple):
    """A partly decided group; None: open. ``puts_off``: weight gradients are deferred, so blocks are not compiled."""

    splits: tuple[ModelSplit, ...]  # with equal tensor and context ranks
    share: RankWork | None = None
    puts_off: bool | None = None
    exchanges: bool = False  # whether the bound includes exchanges within layers
    split: ModelSplit | None = None
    least: float | None = None  # seconds of data ranks' exchange, if something may fit
    recompute: Recompute | None = None


class Next(NamedTuple):
    """The next entry of a list takes at least ``seconds``; the group is None while it is not known yet."""

    seconds: float
    group: OrderGroup | None


class OrderGroups:
    """``room`` is that of the hunt with the least headroom."""

    def __init__(self, bounds: TimeBound, room: MemoryBound, space: Space) -> None:
        self.bounds, self.room, self.space = bounds, room, space
        self.worked = 0
        self._known: list[OrderGroup] = []
        self._heap: list[tuple[float, int, OpenGroup]] = []
        self._number = count()
        self._resting: dict[tuple[ModelSplit, int, int], float] = {}
        self._fitting: dict[tuple[object, ...], list[tuple[bool, tuple[ModelSplit, ...]]]] = {}
        self._filled: dict[tuple[object, ...], float] = {}
        alike: dict[tuple[int, int], list[ModelSplit]] = {}
        for split in space.splits():
            alike.setdefault((split.tp, split.cp), []).append(split)
        for splits in alike.values():
            bound = min(bounds.of_split(split, space.orders(split)) for split in splits)
            self._push(bound, OpenGroup(tuple(splits)))

    def at(self, place: int) -> Next | None:
        """The entry at this place of the list; None beyond its end. If finding it is slow, it is found in steps."""
        enough = self.worked + AT_ONCE
        while len(self._known) <= place and self._heap:
            if self.worked >= enough:
                return Next(self._heap[0][0], None)
            seconds, _, node = heapq.heappop(self._heap)
            if node.share is None or node.split is None or node.recompute is None:
                self._open(node, seconds)
            elif orders := self.space.orders(node.split, node.recompute, node.puts_off):
                self._known.append(OrderGroup(seconds, node.split, node.share, orders, self.bounds))
        if place >= len(self._known):
            return None
        return Next(self._known[place].seconds, self._known[place])

    def ordered(self, group: OrderGroup) -> list[tuple[float, PipelineOrder]]:
        """A group's orders; the first caller pays for their bounds."""
        self.worked += 0 if group.counted else len(group.orders)
        group.counted = True
        return group.ordered

    def _push(self, bound: float, node: OpenGroup) -> None:
        self.worked += 1
        heapq.heappush(self._heap, (bound, next(self._number), node))

    def _open(self, node: OpenGroup, seconds: float) -> None:
        """Make one more decision: what a rank works on at a time, then the pipeline's depth."""
        splits, share, puts_off, exchanges, split, least, _ = node
        if share is None:
            self._open_splits(seconds, splits)
        elif puts_off is None:
            self._open_share(seconds, splits, share)
        elif not exchanges:
            self.worked += PRICED_SHARE
            bound = self.bounds.of_rate(splits[0], share, self._compiled(splits[0], puts_off))
            fill = self._fill(splits, share, puts_off)
            self._push(max(seconds, fill * bound), OpenGroup(splits, share, puts_off, True))
        elif split is None:
            compiled = self._compiled(splits[0], puts_off)
            for deep in splits:
                orders = self.space.orders(deep, None, puts_off)
                bound = self.bounds.of_share(deep, share, "none", orders, compiled)
                self._push(max(seconds, bound), OpenGroup(splits, share, puts_off, True, deep))
        elif least is None:
            self._open_deep(seconds, node, split, share, puts_off)
        else:
            orders = self.space.orders(split, None, puts_off)
            compiled = self.bounds.compiled(split, orders[0])
            for again in RECOMPUTES:
                sent = self._sent(split, share, again, puts_off)
                if sent is not None:
                    bound = self.bounds.of_share(split, share, again, orders, compiled) + least + sent
                    self._push(bound, node._replace(recompute=again))

    def _open_splits(self, seconds: float, splits: tuple[ModelSplit, ...]) -> None:
        by_micro: dict[tuple[object, ...], tuple[float, float]] = {}
        for share, found in self._shares(splits).items():
            where = tuple(found)
            key = share.micro, where
            if key not in by_micro:
                each = (self.bounds.of_split(deep, self.space.orders(deep), share.micro) for deep in where)
                by_micro[key] = max(seconds, min(each)), self._fill(where, share, None, False)
            least, fill = by_micro[key]
            self._push(max(least, fill * self.bounds.of_tokens(where[0], share)), OpenGroup(where, share))

    def _open_share(self, seconds: float, splits: tuple[ModelSplit, ...], share: RankWork) -> None:
        for puts_off, fitting in self._resting_in(splits, share.ep):
            self.worked += 1
            bound = self.bounds.of_layers(fitting[0], share, self._compiled(fitting[0], puts_off))
            fill = self._fill(fitting, share, puts_off)
            self._push(max(seconds, fill * bound), OpenGroup(fitting, share, puts_off))

    def _open_deep(
        self, seconds: float, node: OpenGroup, split: ModelSplit, share: RankWork, puts_off: bool
    ) -> None:
        again = self._least_again(split, share, puts_off)
        if again is None:
            return
        orders = self.space.orders(split, None, puts_off)
        compiled = self.bounds.compiled(split, orders[0])
        exchanged = self.bounds.of_exchange(split, share, orders, compiled=compiled)
        if again != "none":  # known already without recomputation
            seconds = max(seconds, self.bounds.of_share(split, share, again, orders, compiled))
        self._push(seconds + exchanged, node._replace(least=exchanged))

    def _fill(
        self, splits: tuple[ModelSplit, ...], share: RankWork, puts_off: bool | None, played: bool = True
    ) -> float:
        """A lower bound on how many times its work the best of these pipelines takes."""
        key = splits, share.micro, puts_off, played
        known = self._filled.get(key)
        if known is None:
            batch, fill, orders = self.space.recipe.batch, self.bounds.fill, self.space.orders
            known = self._filled[key] = min(
                fill(one.pp, accumulation(batch, one.data, share.micro), orders(one, None, puts_off), played)
                for one in splits
            )
        return known

    def _compiled(self, split: ModelSplit, puts_off: bool) -> bool:
        return self.bounds.compiled(split, self.space.orders(split, None, puts_off)[0])

    def _least_again(self, split: ModelSplit, share: RankWork, puts_off: bool) -> Recompute | None:
        """The least recomputation with which activations may fit, on the device or offloaded."""
        fitting = (again for again in RECOMPUTES if self._sent(split, share, again, puts_off) is not None)
        return next(fitting, None)

    def _sent(self, split: ModelSplit, share: RankWork, again: Recompute, puts_off: bool) -> float | None:
        """Seconds added by offloading activations if they do not fit otherwise; None if that does not help."""
        orders = self.space.orders(split, again, puts_off)
        if not orders:
            return None
        if self.room.fits(split, self.room.kept_by_any(split, share, orders)):
            return 0.0
        if again == "none" or not self._sends:
            return None
        return self.bounds.of_sending(split, share, orders)

    @cached_property
    def _sends(self) -> bool:
        """Whether activations may be offloaded."""
        return any(part.what == "activations" for way in self.space.offloads for part in way)

    def _shares(self, splits: tuple[ModelSplit, ...]) -> dict[RankWork, list[ModelSplit]]:
        """Each work share with the splits that have it."""
        found: dict[RankWork, list[ModelSplit]] = {}
        for split in splits:
            for share in self.space.shares(split):
                found.setdefault(share, []).append(split)
        return found

    def _resting_in(
        self, splits: tuple[ModelSplit, ...], ep: int
    ) -> list[tuple[bool, tuple[ModelSplit, ...]]]:
        """Splits where everything at rest may fit, by whether weight gradients are deferred. Usually without offload;
        offloads are tried if that does not fit. Activations are checked once it is known which of them a pipeline
        holds.
        """
        key = splits, ep
        known = self._fitting.get(key)
        if known is None:
            offloads = ((NOTHING,), self.space.offloads)
            fitting = [one for one in splits if any(self._rests(one, ep, away) < inf for away in offloads)]
            parts = (
                (late, tuple(one for one in fitting if self.space.orders(one, None, late)))
                for late in (False, True)
            )
            known = self._fitting[key] = [part for part in parts if part[1]]
        return known

    def _rests(self, split: ModelSplit, ep: int, away: tuple[tuple[Offload, ...], ...]) -> float:
        key = split, ep, len(away)
        known = self._resting.get(key)
        if known is None:
            known = self._resting[key] = least_resting(self.room, split, ep, away)
        return known


class MergedGroups:
    """Several lists merged into one."""

    def __init__(self, *lists: OrderGroups) -> None:
        self._lists = lists
        self._places = [0] * len(lists)
        self._known: list[OrderGroup] = []
        self._before = sum(one.worked for one in lists)

    @property
    def worked(self) -> int:
        return sum(one.worked for one in self._lists) - self._before

    def at(self, place: int) -> Next | None:
        while len(self._known) <= place:
            tops = [one.at(where) for one, where in zip(self._lists, self._places, strict=True)]
            found = min((one for one in tops if one), key=lambda one: one.seconds, default=None)
            if found is None or found.group is None:
                return found
            self._known.append(found.group)
            self._places[tops.index(found)] += 1
        return Next(self._known[place].seconds, self._known[place])

    def ordered(self, group: OrderGroup) -> list[tuple[float, PipelineOrder]]:
        return self._lists[0].ordered(group)


def least_resting(
    room: MemoryBound, split: ModelSplit, ep: int, offloads: Iterable[tuple[Offload, ...]]
) -> float:
    """Bytes at rest on a rank; infinite if not even an update fits."""
    needs = (room.of_split(split, ep, offload) for offload in offloads)
    return min((rest for rest, peak in needs if room.fits(split, peak)), default=inf)


def may_fit(
    room: MemoryBound, split: ModelSplit, shares: list[RankWork], offloads: Iterable[tuple[Offload, ...]]
) -> list[RankWork]:
    """Of shares that differ only in the micro-batch: those where states and a backward pass may fit together."""
    resting = least_resting(room, split, shares[0].ep, offloads)
    fitting = bisect(shares, 0, key=lambda one: not room.fits(split, room.of_share(split, one, resting)))
    return shares[:fitting]
