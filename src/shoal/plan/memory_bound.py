"""Lower bounds on a rank's memory, of many layouts at once.

The first rank of a pipeline is looked at, and the last one where weight gradients are put off, which it does the most:
in the backward pass of the last block, and at the update. Of a ledger's parts those are counted that are cheap to say:
states, kept activations, gathered or cast weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.facts.bytes_per_parameter import bytes_per_parameter
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import Stack
from shoal.facts.config import Lora
from shoal.facts.layout import RECOMPUTES, Layout, Recompute
from shoal.facts.layout.float8 import gathered_width
from shoal.facts.layout.offload import away_bytes
from shoal.facts.model import Model
from shoal.facts.nf4 import WIDTH
from shoal.facts.recipe import Recipe
from shoal.plan.headroom import NONE, Headroom
from shoal.plan.pipelines import Columns
from shoal.plan.space import PLAIN, ModelSplit, WorkShare, layout_of, one_sequence
from shoal.plan.state_columns import StateColumns
from shoal.plan.time_bound import Rows, TimeBound
from shoal.predict.memory.block_workload import BlockActivations
from shoal.predict.memory.device import host_share, on_top
from shoal.predict.memory.micro_batch import micro_batch_bytes
from shoal.predict.memory.peaks import BATCH_BYTES
from shoal.predict.rank_parameters import ShardDegrees, block_count, end_counts, expert_elements
from shoal.predict.workload import Workload

# Optimizers that keep as many bytes of every parameter.
ALIKE = ("adamw", "sgd", "lion")


class Sizes(NamedTuple):
    """Elements on a tensor rank: of a block without experts and with them, of its experts, of the ends; and of the
    largest piece that is offloaded or stays as a whole.
    """

    dense: int
    sparse: int
    routed: int
    embedding: int
    head: int
    largest: int


@dataclass
class MemoryBound:
    """Of one model on one kind of device. ``time`` has the tables of pipelines."""

    model: Model
    cluster: Cluster
    recipe: Recipe
    stack: Stack
    lora: Lora | None
    time: TimeBound
    compile: bool | None = None
    headroom: Headroom = NONE

    def __post_init__(self) -> None:
        # One device may work through all of a batch at once.
        alone = self.cluster.nodes * self.cluster.devices_per_node == 1
        self.hold = bytes_per_parameter(self.recipe, self.stack, one_pass=alone)
        self.in_shards = bytes_per_parameter(self.recipe, self.stack, sharded=True)
        self.capacity = self.cluster.device.memory_bytes
        self.host = host_share(self.cluster)
        self.away = away_bytes(self.recipe, PLAIN, 1, self.stack)
        # By what each depends on, and not by the model, whose hash takes a while.
        self._most = cache(self._allocated)
        self._sizes = cache(self._counted)
        self._blocks: dict[tuple[object, ...], BlockActivations] = {}

    def most(self, split: ModelSplit) -> float:
        """The most that a device has room for, with as few communicators as this split can have."""
        return self._most(split)

    def _allocated(self, split: ModelSplit) -> float:
        """What comes on top grows in proportion; a few bytes are for rounding."""
        layout = layout_of(fsdp=split.data, tp=split.tp, cp=split.cp, pp=split.pp)
        none, much = (on_top(self._workload(layout), size) for size in (0, 2**40))
        free = self.headroom.bytes(self.capacity)
        at_p90 = (self.capacity - none.p90) / (much.p90 - none.p90)
        expected = (self.capacity - free - none.total) / (much.total - none.total)
        return min(at_p90, expected) * 2**40 + 16

    def of_states(
        self,
        split: ModelSplit,
        shares: Sequence[WorkShare],
        rows: Rows,
        states: StateColumns,
        least: bool = False,
    ) -> Columns:
        """Bytes of whole layouts but for their units. ``least``: also where the same states are over fewer ranks."""
        share, table = shares[0], self.time.pipelines(split.pp)
        ep, piped = share.ep, split.pp > 1
        sizes = self._sizes(split.tp, ep)
        hold, in_shards = self.hold, self.in_shards
        # By pipeline and rank: elements, of these routed experts.
        routed = (table.held_sparse * sizes.routed)[rows.pipeline]
        whole = (
            table.held_dense * sizes.dense
            + table.held_sparse * sizes.sparse
            + table.embedding * sizes.embedding
            + table.head * sizes.head
        )[rows.pipeline]
        # By states.
        dense_ranks, expert_ranks, zero, copies = (
            states.ranks,
            states.expert_ranks,
            states.zero,
            states.copies,
        )
        shared = dense_ranks > 1
        sharded = shared & ((zero == 3) | (self.stack.unsharded != "buckets"))
        scattered = sharded | (shared & (zero == 2))
        kind, owner = states.kind[rows.states], states.owner[rows.states]
        away = states.away[owner]

        def column(of_kinds: Columns) -> Columns:
            return np.asarray(of_kinds[kind][:, None])

        in_rank = (whole - routed) / column(dense_ranks) + routed / column(expert_ranks)
        alone = np.where(column(expert_ranks) == 1, routed, 0.0)  # experts that no other rank of a copy holds
        trains = self.lora is None and not self.recipe.freezes
        trained, trained_share = (whole, in_rank) if trains else (0.0 * whole, 0.0 * in_rank)
        host_updates, fetched = away[:, 0][:, None], away[:, 1][:, None]
        in_shards_now = column(sharded) & (host_updates == 0)  # what rests in shards is as wide as its states

        def width(name: str) -> Columns:
            return np.asarray(np.where(in_shards_now, getattr(in_shards, name), getattr(hold, name)))

        each = width("weight")
        if self.lora is not None:
            each = width("frozen") if self.lora.base != "nf4" else np.full_like(each, float(WIDTH))
        elif self.recipe.freezes:
            each = np.minimum(each, width("frozen"))
        weight = each * np.where(column(sharded), in_rank, whole)
        # Experts that are whole rest as they do without shards; what their masters take besides is left out.
        weight = weight - np.where(
            column(sharded), np.maximum(0.0, width("weight") - hold.weight) * alone, 0.0
        )
        piece = sizes.largest / column(np.minimum(dense_ranks, expert_ranks))
        in_one = np.where(column(sharded), piece, sizes.largest)
        weight = self._stays(weight, fetched, each * in_one)
        moments = width("moments") * (self.recipe.optimizer in ALIKE and not self.recipe.blockwise)
        optimizer = (moments + width("master")) * trained_share
        optimizer = self._stays(optimizer, host_updates, (moments + width("master")) * piece)
        leaves = (host_updates > 0) & (column(scattered) | (not piped))
        gradient = width("gradient") * np.where(column(scattered), trained_share, trained)
        gradient = np.where(leaves, 0.0, gradient)

        begun, before = (
            self._gradients(
                split, whole, routed, alone, trained, trained_share, begun,
                column(sharded), column(shared), column(zero), column(copies), host_updates > 0,
                column(expert_ranks), least,
            )
            for begun in (True, False)
        )  # fmt: skip
        # By what is sent away: nothing, half, all.
        orders, at = _orders(rows, len(table.names))
        kept = self._kept(split, shares, orders)
        part = np.ceil(2 * away[:, 2]).astype(np.intp)
        kept_before, kept_later = (one[part, at] for one in kept)
        if self.hold.cast and self.lora is None:
            # Weights that autograd keeps in a cast.
            casts = self._casts(split, shares, rows) * ~column(sharded)
            kept_before, kept_later = kept_before + casts, kept_later + casts * (kept_later > 0)
        once = (self.time.times(split, shares)[rows.share] == 1)[:, None]
        full = np.maximum(gradient, np.maximum(kept_before + before, np.where(once, before, begun)))
        full = np.maximum(full, np.where(kept_later > 0, kept_later + begun, 0.0))
        found: Columns = (weight + optimizer + full).max(axis=1)
        return found

    def _stays(self, size: Columns, fraction: Columns, largest: Columns) -> Columns:
        """What is left on the device: cut between tensors, a piece at most goes that need not."""
        return np.where(fraction > 0, np.maximum(0.0, (1 - fraction) * size - largest), size)

    def _gradients(
        self,
        split: ModelSplit,
        whole: Columns,
        routed: Columns,
        alone: Columns,
        trained: Columns,
        trained_share: Columns,
        begun: bool,
        sharded: Columns,
        shared: Columns,
        zero: Columns,
        copies: Columns,
        away: Columns,
        expert_ranks: Columns,
        least: bool,
    ) -> Columns:
        """Gradients and gathered weights in the backward pass: before gradients are there, and with them.

        Experts that are ``alone`` are gathered from nowhere; before the first pass their gradients may not be there.
        """
        hold, piped = self.hold, split.pp > 1
        late = 0.0 if begun else hold.gradient * alone
        if piped:
            there = alone
            if least:
                # Over fewer ranks experts may be whole: then they rest as narrow as they are used, and nowhere else.
                narrower = self.in_shards.weight / hold.compute * routed / expert_ranks
                there = np.maximum(alone, np.minimum(routed, narrower))
            in_shards = gathered_width(self.recipe) * (whole - there)
            if begun:
                in_shards = in_shards + hold.reduce * trained
        else:
            # Replicas of shards add up in the precision that their sums travel in.
            width = np.where(copies, min(hold.gradient, hold.reduce), hold.gradient)
            in_shards = width * trained_share if begun else 0.0 * whole
        lean = (zero == 2) & (not piped)
        of_shared = np.where(lean, hold.gradient * trained_share - late, hold.gradient * trained - late)
        of_whole = (
            hold.gradient * trained - late if begun else np.where(copies, hold.gradient * trained - late, 0.0)
        )
        found = np.where(sharded, in_shards, np.where(shared, of_shared, of_whole))
        if not piped:
            found = np.where(away, 0.0, found)  # gradients follow the states
        return found

    def _kept(self, split: ModelSplit, shares: Sequence[WorkShare], rows: Rows) -> tuple[Columns, Columns]:
        """Activations in the backward pass of the last block: at the fullest moment before there are gradients, and
        with them. By how much is sent away, row and rank.
        """
        table, share = self.time.pipelines(split.pp), shares[0]
        filled = self.time.filled(split, shares)
        micro = np.array([one.micro for one in shares], dtype=float)[rows.share][:, None]
        blocks = self._activations(split, share)[rows.recompute, table.compiled[rows.pipeline]]
        resting, deferred, fullest = np.moveaxis(blocks, -1, 0)  # by row and kind
        here = (
            np.stack([table.held_dense, table.held_sparse], axis=-1)[rows.pipeline] > 0
        )  # by row, rank and kind
        working = np.maximum(0.0, micro * np.where(here, fullest[:, None, :], np.inf).min(axis=-1))
        tokens = micro * self.recipe.seq // split.cp
        times = self.time.times(split, shares)[rows.share][:, None]
        fixed = BATCH_BYTES * tokens * times + working
        stream = (tokens / split.tp if share.sp else tokens) * self.model.hidden * self.hold.compute
        place = rows.share, rows.pipeline
        each = (micro * resting).T[..., None, None]
        late = (micro * deferred).T[..., None, None]
        always = filled.stages[place] * stream[:, :, None]
        always = always + filled.late_dense[place] * late[0] + filled.late_sparse[place] * late[1]
        begun = filled.begun[place]
        before, later = [], []
        for dense, sparse in (
            (filled.dense, filled.sparse),
            (filled.half_dense, filled.half_sparse),
            (filled.rest_dense, filled.rest_sparse),
        ):
            flying = fixed[:, :, None] + np.maximum(
                0.0, always + dense[place] * each[0] + sparse[place] * each[1]
            )
            before.append(np.maximum(fixed, np.where(begun == 0, flying, 0.0).max(axis=-1)))
            later.append(np.where(begun == 1, flying, 0.0).max(axis=-1))
        return np.stack(before), np.stack(later)

    def _casts(self, split: ModelSplit, shares: Sequence[WorkShare], rows: Rows) -> Columns:
        """Weights in the compute precision, of all micro-batches that are held but for the block that is computed."""
        table, filled = self.time.pipelines(split.pp), self.time.filled(split, shares)
        sizes = self._sizes(split.tp, shares[0].ep)
        weights = self.hold.compute * np.array([sizes.dense, sizes.sparse])
        place = rows.share, rows.pipeline
        held = np.nan_to_num(filled.dense[place] * weights[0] + filled.sparse[place] * weights[1]).min(
            axis=-1
        )
        eager = (rows.recompute == 0) & (table.compiled[rows.pipeline] == 0)
        return np.asarray(np.maximum(0.0, held - weights.max()) * eager[:, None])

    def _activations(self, split: ModelSplit, share: WorkShare) -> Columns:
        """Of one block and one sequence: by what is computed again, whether blocks are compiled, and whether they have
        experts; what rests, what is left where weight gradients are put off, and the most of a backward pass.
        """
        found = np.zeros((len(RECOMPUTES), 2, 2, 3))
        used = {*self.time.pipelines(split.pp).compiled.tolist()}
        for row, again in enumerate(RECOMPUTES):
            for some in used:
                for kind, count in enumerate(self._layers):
                    if count:
                        one = self._block(split, share, again, kind == 1, bool(some))
                        found[row, some, kind] = one.resting, one.deferred, one.fullest
        return found

    def of_host(
        self, split: ModelSplit, shares: Sequence[WorkShare], rows: Rows, states: StateColumns
    ) -> Columns:
        """Bytes in the host's memory, of states that an update reads alone."""
        if not states.away[:, 0].any() or self.lora is not None:
            return np.zeros(len(rows.share))
        # Of the rank that has the least: which one is the fullest is not known.
        numbers = range(len(self.time.pipelines(split.pp).names))
        elements = np.array(
            [min(map(sum, self.time.elements(split, shares[0], one))) for one in numbers], dtype=float
        )
        # Of gradients nothing is counted.
        each = (np.where(states.in_files, 0.0, self.away.states) * states.away[:, 0])[states.owner]
        each = each / states.ranks[states.kind]
        found: Columns = elements[rows.pipeline] * each[rows.states]
        return found

    @cached_property
    def _layers(self) -> tuple[int, int]:
        """Without experts and with them."""
        sparse = sum(self.model.has_experts(number) for number in range(self.model.layers))
        return self.model.layers - sparse, sparse

    def _counted(self, tp: int, ep: int) -> Sizes:
        degrees = ShardDegrees(tp, ep, 1, 1)
        dense, sparse = self._layers
        ends = end_counts(self.model, degrees)
        routed = expert_elements(self.model, tp, ep) if sparse else 0
        blocks = [
            block_count(self.model, kind, degrees, None).whole if count else 0
            for kind, count in ((False, dense), (True, sparse))
        ]
        return Sizes(
            blocks[0],
            blocks[1],
            routed,
            ends.embedding.whole,
            ends.head.whole,
            max(*blocks, ends.embedding.whole),
        )

    def _workload(self, layout: Layout) -> Workload:
        return Workload(
            self.model, self.cluster, self.recipe, layout, self.stack, lora=self.lora, compile=self.compile
        )

    def _block(
        self, split: ModelSplit, share: WorkShare, recompute: Recompute, experts: bool, compiled: bool
    ) -> BlockActivations:
        """With one sequence; everything of it grows in proportion to the micro-batch."""
        key = split.tp, split.cp, share.sp, share.cp_kind, share.ep > 1, recompute, experts, compiled
        known = self._blocks.get(key)
        if known is None:
            workload = replace(self._workload(one_sequence(split, share, recompute)), compile=compiled)
            alike = [
                one for kind, one in micro_batch_bytes(workload).blocks.items() if kind.experts == experts
            ]
            known = self._blocks[key] = min(alike, key=lambda one: one.resting)
        return known


def _orders(rows: Rows, pipelines: int) -> tuple[Rows, NDArray[np.intp]]:
    """The orders among these rows, and which one each has."""
    number = (rows.share * len(RECOMPUTES) + rows.recompute) * pipelines + rows.pipeline
    orders, at = np.unique(number, return_inverse=True)
    share, recompute = np.divmod(orders // pipelines, len(RECOMPUTES))
    return Rows(share, recompute, orders % pipelines, np.zeros_like(share)), at
