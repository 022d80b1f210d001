"""The layouts of a space but for their states, in the order in which they may be fast.

All hunts through a space read one such list (``plan/best_first.py``), which grows as they do: a split, what a rank
works on at a time, what it computes again and in which order are as fast whatever headroom is asked for and whatever
waits elsewhere.
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
from shoal.plan.space import NOTHING, ModelSplit, PipelineOrder, Space, WorkShare
from shoal.plan.time_bound import TimeBound

# Work that is done at once for the next group of a list.
AT_ONCE = 500
# Pricing a new share takes as long as so many bounds.
PRICED_SHARE = 4


@dataclass(eq=False)
class OrderGroup:
    """The orders of one share that compute the same again; a step takes at least ``seconds`` in any of them."""

    seconds: float
    split: ModelSplit
    share: WorkShare
    orders: list[PipelineOrder]
    bounds: TimeBound
    counted: bool = False  # whether someone has looked at them

    @cached_property
    def ordered(self) -> list[tuple[float, PipelineOrder]]:
        """Each with how long a step takes at least."""
        bound = self.bounds.of_order
        return [(bound(self.split, self.share, order) + self.exchanged, order) for order in self.orders]

    @cached_property
    def exchanged(self) -> float:
        """What data ranks exchange comes on top."""
        return self.of_stage(*ZEROS)

    def of_stage(self, *zeros: Zero) -> float:
        """The same where it is known what they share out."""
        compiled = self.bounds.compiled(self.split, self.orders[0])
        return self.bounds.of_exchange(self.split, self.share, self.orders, zeros, compiled)


class OpenGroup(NamedTuple):
    """Some of what makes a group; what is None is still open. ``puts_off``: whether weight gradients are, without which
    blocks are compiled.
    """

    splits: tuple[ModelSplit, ...]  # alike in their tensor and context ranks
    share: WorkShare | None = None
    puts_off: bool | None = None
    exchanges: bool = False  # whether what ranks exchange within layers is in the bound
    split: ModelSplit | None = None
    least: float | None = None  # seconds of data ranks' exchange, where something may fit
    recompute: Recompute | None = None


class Next(NamedTuple):
    """What comes next in a list takes at least ``seconds``; the group is None while it is not known yet."""

    seconds: float
    group: OrderGroup | None


class OrderGroups:
    """``room`` is that of the hunt that has the most of it."""

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
        """The one at this place of the list; None beyond its end. Where finding it takes long, it is found in parts."""
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
        """A group's orders, whose bounds are work for the first who asks."""
        self.worked += 0 if group.counted else len(group.orders)
        group.counted = True
        return group.ordered

    def _push(self, bound: float, node: OpenGroup) -> None:
        self.worked += 1
        heapq.heappush(self._heap, (bound, next(self._number), node))

    def _open(self, node: OpenGroup, seconds: float) -> None:
        """One more decision: what a rank works on at a time, then how deep the pipeline is."""
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

    def _open_share(self, seconds: float, splits: tuple[ModelSplit, ...], share: WorkShare) -> None:
        for puts_off, fitting in self._resting_in(splits, share.ep):
            self.worked += 1
            bound = self.bounds.of_layers(fitting[0], share, self._compiled(fitting[0], puts_off))
            fill = self._fill(fitting, share, puts_off)
            self._push(max(seconds, fill * bound), OpenGroup(fitting, share, puts_off))

    def _open_deep(
        self, seconds: float, node: OpenGroup, split: ModelSplit, share: WorkShare, puts_off: bool
    ) -> None:
        again = self._least_again(split, share, puts_off)
        if again is None:
            return
        orders = self.space.orders(split, None, puts_off)
        compiled = self.bounds.compiled(split, orders[0])
        exchanged = self.bounds.of_exchange(split, share, orders, compiled=compiled)
        if again != "none":  # without it, that is known
            seconds = max(seconds, self.bounds.of_share(split, share, again, orders, compiled))
        self._push(seconds + exchanged, node._replace(least=exchanged))

    def _fill(
        self, splits: tuple[ModelSplit, ...], share: WorkShare, puts_off: bool | None, played: bool = True
    ) -> float:
        """How many times as long as its work the best of these pipelines takes at least."""
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

    def _least_again(self, split: ModelSplit, share: WorkShare, puts_off: bool) -> Recompute | None:
        """What is computed again at least so that activations may fit, here or elsewhere."""
        fitting = (again for again in RECOMPUTES if self._sent(split, share, again, puts_off) is not None)
        return next(fitting, None)

    def _sent(self, split: ModelSplit, share: WorkShare, again: Recompute, puts_off: bool) -> float | None:
        """Seconds that sending activations away adds, where they do not fit otherwise; None where nothing helps."""
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
        """Whether activations may wait elsewhere."""
        return any(part.what == "activations" for way in self.space.offloads for part in way)

    def _shares(self, splits: tuple[ModelSplit, ...]) -> dict[WorkShare, list[ModelSplit]]:
        """Each with the splits that have it."""
        found: dict[WorkShare, list[ModelSplit]] = {}
        for split in splits:
            for share in self.space.shares(split):
                found.setdefault(share, []).append(split)
        return found

    def _resting_in(
        self, splits: tuple[ModelSplit, ...], ep: int
    ) -> list[tuple[bool, tuple[ModelSplit, ...]]]:
        """Where all that rests may fit, by whether weight gradients are put off. As a rule with nothing offloaded; the
        rest is asked where that does not fit. Activations are looked at once it is known which a pipeline keeps.
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
    """Several lists as one."""

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
    """Bytes that rest on a rank; infinite where not even an update fits."""
    needs = (room.of_split(split, ep, offload) for offload in offloads)
    return min((rest for rest, peak in needs if room.fits(split, peak)), default=inf)


def may_fit(
    room: MemoryBound, split: ModelSplit, shares: list[WorkShare], offloads: Iterable[tuple[Offload, ...]]
) -> list[WorkShare]:
    """Of shares that differ only in the micro-batch: what rests may fit, and a backward pass beside it."""
    resting = least_resting(room, split, shares[0].ep, offloads)
    fitting = bisect(shares, 0, key=lambda one: not room.fits(split, room.of_share(split, one, resting)))
    return shares[:fitting]
