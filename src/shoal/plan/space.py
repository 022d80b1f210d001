"""The space of layouts: every legal value of every key, on a fixed grid where a key has no natural limit.

A layout is decided in four steps, and so is a search over it: how the network is split (``ModelSplit``), what one rank
works on at a time (``RankWork``), in which order and with which recomputation (``PipelineOrder``), and how states are
sharded (``StateSharding``). A ``Candidate`` is all four.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from shoal.facts import support
from shoal.facts.config import Config, Lora, ModelSection
from shoal.facts.layout import (
    CONTEXT_KINDS,
    ONE_CHUNK,
    RECOMPUTES,
    SCHEDULES,
    V_SHAPED,
    ContextKind,
    Layout,
    Offload,
    Recompute,
    Schedule,
    Zero,
    divisors,
)
from shoal.facts.layout.legality import Case, broken
from shoal.facts.layout.parameter_groups import Placement, experts_fit, placement
from shoal.facts.layout.stack_limits import RULES, Asked
from shoal.facts.layout.stack_limits import runs as stack_runs
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.facts.strategies import OWNERS

# Searched values of keys without a natural limit.
CHUNKS = (1, 2, 3, 4, 6, 8)
UNITS = (1, 2, 4, 8)
# The fewest tokens of a sequence per context rank in published runs: Megatron-Bridge's recipe of Llama 3.1 405B splits
# 8192 in two, Llama 3's own run 131,072 in 16. Shorter pieces are searched, but not chosen (``short``).
LEAST_TOKENS = 4096
OFFLOADED: tuple[tuple[str, ...], ...] = (
    ("optimizer",),
    ("optimizer", "params"),
    ("activations",),
    ("optimizer", "params", "activations"),
    ("optimizer@nvme",),
    ("optimizer@nvme", "params@nvme"),
    ("optimizer:0.5",),
    ("optimizer", "activations"),
)
NOTHING: tuple[Offload, ...] = ()
OFFLOADS = tuple(Layout.parse(f"offload={'+'.join(parts)}").offload for parts in OFFLOADED)
# The maximal offload, for blocks that recompute and for others.
EVERYTHING: dict[Recompute, tuple[Offload, ...]] = {
    "none": OFFLOADS[1],
    "selective": OFFLOADS[3],
    "full": OFFLOADS[3],
}
# The same on NVMe: same device memory, slower, for when host memory is full.
ON_NVME = {OFFLOADS[0]: OFFLOADS[4], OFFLOADS[1]: OFFLOADS[5]}
# Fractions of the optimizer to try for a layout that fits with some of it offloaded: those that need less host time,
# up to the one where device and host finish together (``plan/best_first.py``).
FRACTIONS = tuple(round(part / 20, 2) for part in range(1, 21))


def cuts_short(seq: int, cp: int) -> bool:
    """Whether context ranks have fewer tokens of a sequence than in published runs."""
    return cp > 1 and seq < cp * LEAST_TOKENS


def has_activations(offload: tuple[Offload, ...], recompute: Recompute) -> bool:
    """Whether blocks save what this would offload: only inputs of recomputed blocks are offloaded as activations."""
    return recompute != "none" or all(part.what != "activations" for part in offload)


PLAIN = Layout()


def layout_of(**keys: Any) -> Layout:
    """A layout without validation, which is slow: all values are known to be legal and canonical."""
    return PLAIN.model_copy(update=keys)


class ModelSplit(NamedTuple):
    tp: int
    cp: int
    pp: int
    data: int  # dp·fsdp


class RankWork(NamedTuple):
    sp: bool
    cp_kind: ContextKind
    ep: int
    micro: int


class PipelineOrder(NamedTuple):
    schedule: Schedule
    chunks: int
    recompute: Recompute


class StateSharding(NamedTuple):
    dp: int
    fsdp: int
    zero: Zero
    offload: tuple[Offload, ...] = NOTHING


def one_sequence(split: ModelSplit, share: RankWork, recompute: Recompute) -> Layout:
    """Everything that determines what a block saves per sequence; a micro-batch saves a multiple of that."""
    return layout_of(
        dp=share.ep, tp=split.tp, sp=share.sp, cp=split.cp, cp_kind=share.cp_kind, ep=share.ep, micro=1,
        recompute=recompute,
    )  # fmt: skip


def placed(split: ModelSplit, states: StateSharding, ep: int = 1) -> Placement:
    """Which ranks shard and replicate parameters of which ``ep`` data ranks hold one set."""
    return placement(split.tp, split.cp, states.fsdp, states.dp, ep)


class Candidate(NamedTuple):
    split: ModelSplit
    share: RankWork
    order: PipelineOrder
    states: StateSharding
    unit: int

    def layout(self) -> Layout:
        return layout_of(
            dp=self.states.dp,
            fsdp=self.states.fsdp,
            zero=self.states.zero,
            unit=self.unit,
            tp=self.split.tp,
            sp=self.share.sp,
            cp=self.split.cp,
            cp_kind=self.share.cp_kind,
            pp=self.split.pp,
            schedule=self.order.schedule,
            chunks=self.order.chunks,
            ep=self.share.ep,
            micro=self.share.micro,
            recompute=self.order.recompute,
            offload=self.states.offload,
        )


@dataclass
class Space:
    """The legal layouts of a model and a recipe on this many devices; ``runnable``: only what the engine runs.

    ``stack``: only what another stack runs.
    """

    model: Model
    recipe: Recipe
    devices: int
    runnable: bool = False
    apart: bool = True  # whether devices have a host to offload to
    short: bool = True  # whether context ranks may have fewer tokens of a sequence than in published runs
    usual: bool = True  # whether they may have as many, or not split sequences at all
    customary: bool = False  # whether only the optimizer states are sharded
    frugal: bool = False  # least memory only: small micro-batches, full recompute, states over all ranks
    stack: str = "shoal"
    lora: Lora | None = None

    def __post_init__(self) -> None:
        self._orders = cache(self._orders_of)
        self._sharings = cache(self._sharings_of)
        self._ways = cache(self._ways_of)
        self.offloads_of = cache(self._offloads_of)

    @property
    def key(self) -> tuple[object, ...]:
        """A cache key: what splits, shares and orders depend on among the variants of one search; and what may be
        offloaded, without which some do not fit.
        """
        return (
            self.frugal,
            self.short,
            self.usual,
            self.offloads,
            *(self._searched(key) for key in ("cp", "ep")),
        )

    def splits(self) -> Iterator[ModelSplit]:
        if not self._legal(Layout()):
            return  # a sequence longer than learned positions
        for tp in divisors(self.devices):
            if not self._legal(Layout(tp=tp, sp=False)):
                continue
            for cp in divisors(self.devices // tp) if self._searched("cp") else (1,):
                wanted = self.short if cuts_short(self.recipe.seq, cp) else self.usual
                if not wanted or not self._ways(tp, cp):
                    continue
                for pp in divisors(self.devices // (tp * cp)):
                    data = self.devices // (tp * cp * pp)
                    if self._sequences % data == 0 and pp <= self.model.layers:
                        yield ModelSplit(tp, cp, pp, data)

    def shares(self, split: ModelSplit) -> Iterator[RankWork]:
        for alike in self.shares_by_size(split):
            yield from alike

    def shares_by_size(self, split: ModelSplit) -> Iterator[list[RankWork]]:
        """Work shares grouped by everything but the micro-batch, from the smallest to the largest."""
        micros = self._micros(split)
        for sp, kind in self._ways(split.tp, split.cp):
            for ep in self._expert_degrees(split):
                yield [RankWork(sp, kind, ep, micro) for micro in micros]

    def _micros(self, split: ModelSplit) -> tuple[int, ...]:
        rows = self.recipe.loss_facts.rows
        micros = divisors(self._sequences // split.data)[: 1 if self.frugal else None]
        return tuple(rows * micro for micro in micros)

    @property
    def _sequences(self) -> int:
        """The batch in sequences, with rows that belong together counted once."""
        return max(1, self.recipe.batch // self.recipe.loss_facts.rows)

    def orders(
        self, split: ModelSplit, recompute: Recompute | None = None, puts_off: bool | None = None
    ) -> list[PipelineOrder]:
        """``puts_off``: only orders that defer weight gradients, or only those that do not."""
        return self._orders(split.pp, recompute, puts_off)

    def _orders_of(self, pp: int, recompute: Recompute | None, puts_off: bool | None) -> list[PipelineOrder]:
        return [
            PipelineOrder(schedule, chunks, again)
            for schedule, chunks in self._pipelines[pp]
            if puts_off is None or puts_off == (schedule in SPLIT_BACKWARD)
            for again in ((recompute,) if recompute else RECOMPUTES)
            if self._by_stack(pp=pp, schedule=schedule, chunks=chunks, recompute=again, zero=1, micro=1)
        ]

    def sharings(
        self, split: ModelSplit, ep: int, offload: tuple[Offload, ...] = NOTHING
    ) -> list[list[StateSharding]]:
        """Grouped by what is sharded; in each group from the most ranks, and so the least memory, to the fewest."""
        found = self._sharings(split.data, split.cp, ep, offload)
        if self.customary:
            found = [alike for alike in found if alike[0].zero == 1 or not _shared(split, alike[0])]
        if not self._others:
            return found
        within = [[states for states in alike if self._shares(split, states)] for alike in found]
        return [alike for alike in within if alike]

    def _sharings_of(
        self, data: int, cp: int, ep: int, offload: tuple[Offload, ...]
    ) -> list[list[StateSharding]]:
        degrees = divisors(data)[::-1][: 1 if self.frugal else None]
        shared = [fsdp for fsdp in degrees if fsdp * cp > 1 and experts_fit(ep, fsdp * cp)]
        zeros: tuple[Zero, ...] = (3, 2, 1) if shared else ()
        found = [[StateSharding(data // fsdp, fsdp, zero, offload) for fsdp in shared] for zero in zeros]
        return [*found, [StateSharding(data, 1, 3, offload)]] if cp == 1 else found

    def states(
        self, split: ModelSplit, ep: int, offload: tuple[Offload, ...] = NOTHING
    ) -> Iterator[StateSharding]:
        for alike in self.sharings(split, ep, offload):
            yield from alike

    def units(self, split: ModelSplit, states: StateSharding) -> tuple[int, ...]:
        """Blocks per FSDP unit; irrelevant if parameters are not sharded."""
        if states.zero < 3 or placed(split, states).sharded.size == 1 or self._others:
            return (1,)
        most = -(-self.model.layers // split.pp)
        return tuple(unit for unit in UNITS if unit <= most)

    @cached_property
    def offloads(self) -> tuple[tuple[Offload, ...], ...]:
        if not self.apart:
            return ()
        if self._others:
            # For another stack, what it offloads in some layout: it allows the most with everything sharded.
            return tuple(
                offload
                for offload in OFFLOADS
                if self._by_stack(offload=offload, recompute="full", fsdp=2, zero=3, micro=1)
                or self._by_stack(offload=offload, recompute="full", fsdp=2, zero=1, micro=1)
            )
        return tuple(one for one in OFFLOADS if not self.runnable or self._runs(one))

    def _runs(self, offload: tuple[Offload, ...]) -> bool:
        """Whether the engine supports it with this model and recipe; activations require recomputation."""
        config = Config(recipe=self.recipe, model=ModelSection(lora=self.lora))
        return not support.missing(config, self.model, Layout(recompute="full", offload=offload))

    def _offloads_of(self, recompute: Recompute) -> tuple[tuple[Offload, ...], ...]:
        return tuple(offload for offload in self.offloads if has_activations(offload, recompute))

    def everything(self) -> Iterator[Candidate]:
        """All candidates, one by one."""
        for split in self.splits():
            for share in self.shares(split):
                for order in self.orders(split):
                    for offload in (NOTHING, *self.offloads_of(order.recompute)):
                        for states in self.states(split, share.ep, offload):
                            for unit in self.units(split, states):
                                one = Candidate(split, share, order, states, unit)
                                if self.admits(one):
                                    yield one

    def size(self) -> int:
        """The number of candidates, without enumerating them."""
        total = 0
        known: dict[tuple[object, ...], int] = {}
        for split in self.splits():
            # Tensor ranks do not affect sharding, except through another stack's rules.
            key = split if self._others else split[1:]
            if key not in known:
                known[key] = sum(
                    len(self.units(split, states))
                    for ep in self._expert_degrees(split)
                    for states in self.states(split, ep)
                ) * sum(1 + len(self.offloads_of(order.recompute)) for order in self.orders(split))
            total += len(self._ways(split.tp, split.cp)) * len(self._micros(split)) * known[key]
        return total

    def _ways_of(self, tp: int, cp: int) -> list[tuple[bool, ContextKind]]:
        """Legal values of ``sp`` and ``cp_kind``."""
        return [
            (sp, kind)
            for sp in ((True, False) if tp > 1 else (True,))
            for kind in (CONTEXT_KINDS if cp > 1 else CONTEXT_KINDS[:1])
            if self._legal(Layout(tp=tp, sp=sp, cp=cp, cp_kind=kind))
            and self._by_stack(tp=tp, sp=sp, cp=cp, cp_kind=kind, zero=2, micro=1)
        ]

    @cached_property
    def _pipelines(self) -> dict[int, list[tuple[Schedule, int]]]:
        """Schedules with their chunks, by depth."""
        found: dict[int, list[tuple[Schedule, int]]] = {1: [("1f1b", 1)]}
        for pp in divisors(self.devices)[1:]:
            found[pp] = [
                (schedule, chunks)
                for schedule in SCHEDULES
                for chunks in _chunks(schedule)
                if pp * chunks <= self.model.layers
            ]
        return found

    def _expert_degrees(self, split: ModelSplit) -> list[int]:
        experts = self.model.experts
        if experts is None or not self._searched("ep"):
            return [1]
        return [ep for ep in divisors(experts.count) if split.data * split.cp % ep == 0]

    def _searched(self, key: str) -> bool:
        owner = OWNERS[key]
        return owner.runs or not self.runnable

    def _legal(self, layout: Layout) -> bool:
        case = Case.of(layout, self.model, self.recipe)
        return next(broken(case), None) is None

    @property
    def _others(self) -> bool:
        """Whether another stack's rules apply."""
        return self.stack in RULES

    def has(self, candidate: Candidate) -> bool:
        """Whether it is among the splits and offloads of this space."""
        split, states = candidate.split, candidate.states
        cut = self.short or not cuts_short(self.recipe.seq, split.cp)
        if self.customary and states.zero != 1 and _shared(split, states):
            return False
        return cut and (self.apart or not states.offload)

    def admits(self, candidate: Candidate) -> bool:
        """Whether the stack runs a whole layout that is known to be legal."""
        return not self._others or stack_runs(self.stack, Asked(candidate.layout(), self.model, self.recipe))

    def _shares(self, split: ModelSplit, states: StateSharding) -> bool:
        sp, kind = self._ways(split.tp, split.cp)[0]
        return self._by_stack(
            **states._asdict(), tp=split.tp, sp=sp, cp=split.cp, cp_kind=kind, pp=split.pp, recompute="full"
        )

    def _by_stack(self, **keys: Any) -> bool:
        """Whether the stack runs layouts with only these keys given, at a suitable batch."""
        if not self._others:
            return True
        layout = layout_of(**{"micro": 1, **keys})
        batch = 2 * layout.data_ranks * layout.pp
        recipe = self.recipe.model_copy(update={"batch": batch})
        return stack_runs(self.stack, Asked(layout, self.model, recipe))

    @property
    def runs(self) -> bool:
        """Whether the engine runs this model at all."""
        return not support.missing(Config(), self.model, Layout())


def _shared(split: ModelSplit, states: StateSharding) -> bool:
    return placed(split, states).sharded.size > 1


def _chunks(schedule: Schedule) -> tuple[int, ...]:
    if schedule in ONE_CHUNK:
        return (1,)
    if schedule in V_SHAPED:
        return (2,)
    return CHUNKS[1:] if schedule == "interleaved" else CHUNKS
