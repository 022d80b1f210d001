"""Gradient memory under zero=2 without a pipeline: this rank's shard from the start, plus a few buckets in flight.

If reduced gradients move to the host right away, only the part of the shard that stays on the device counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate

from shoal.facts.layout.offload import IN_FLIGHT, leaves_early
from shoal.facts.model.parameters import EMBEDDING
from shoal.predict.memory.block_workload import BlockActivations
from shoal.predict.memory.in_flight import Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory
from shoal.predict.memory.peak import Peak
from shoal.predict.memory.replicate import ReplicatedGradients
from shoal.predict.offload_cut import LeavingBucket, leaving_buckets
from shoal.predict.rank_parameters import RankParameters, expert_elements, rank_parameters


class ScatteredGradients(ReplicatedGradients):
    def __init__(self, rank: RankInventory) -> None:
        super().__init__(rank)
        self.standing = 0.0
        if leaves_early(self.layout):
            self.stay = 1.0 - rank.offloaded("optimizer")
        self.leaving = 1.0 - self.stay  # share of the reduced gradients that moves to the host
        if self.tune.optimizer_in_backward:
            self.stay = 0.0
        # Parameters in a full bucket. A token embedding gets a bucket of its own.
        self.bucket = self.tune.bucket_mb * 2**20 / self.hold.gradient
        self.others = self.total.trained - self.ends.embedding.trained
        self.apart = self.in_buckets = 0
        # Routed experts are a group of their own, even if as many ranks shard them as shard the rest.
        if self.model.experts is not None and not self.adapters_only:
            layers = sum(run.layers for one in rank.stages for run in one.runs if run.experts)
            self.apart = layers * expert_elements(self.model, self.layout.tp, self.layout.ep)
            # Gradients of experts that no other rank has are not sent.
            self.in_buckets = 0 if rank.lone_experts else self.apart
        workload = rank.workload
        here = rank_parameters(workload.layout, workload.model, workload.cut_by, rank.number)
        matrices = [one.size for block in (here.dense_block, here.sparse_block) for one in block.tensors]
        # The largest bucket without experts, embedding or head.
        self.dense_bucket = max(self.bucket, *matrices)
        # Of these, parameters that may share a bucket with the first gradients, the head's and final norm's.
        self.with_head = self._with_head(here) if workload.recipe.blockwise else self.others - self.apart
        if not self.model.tied:
            head = self.ends.head.trained
            bucket = self.hold.reduce * min(max(self.bucket, head), self.with_head)
            # A cast product has been freed by then.
            self.head_bucket = bucket

    def _with_head(self, here: RankParameters) -> int:
        """With blockwise moments, only parameters of the same block length share a bucket."""
        head = {one.block for one in (*here.norm.tensors, *here.head.tensors) if one.name != EMBEDDING}
        counted = (
            (here.dense, here.dense_block),
            (here.sparse, here.sparse_block),
            (1, here.norm),
            (1, here.head),
        )
        return sum(times * one.size for times, part in counted for one in part.tensors if one.block in head)

    def in_loss(self, moment: Moment) -> float:
        """The last bucket of a backward pass (the embedding's) is freed once the next bucket is sent."""
        return self.hold.reduce * self.ends.embedding.trained if moment.before else 0.0

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: float | None) -> float:
        """One bucket fills, one is in flight; while the first fills, that may be the previous pass's last."""
        if not done and made == 0:
            if self.apart and run.experts and self.head_bucket:
                return self._while_experts(moment, done, made)
            return (
                self.tied_head(moment)
                + min(self.buckets(1), self.hold.reduce * self.with_head)
                + self.in_loss(moment)
            )
        if self.reduced(moment, done) + self.made(run, made) <= self.bucket:
            # The same holds for the experts' bucket of the previous pass; by then the next one is filling.
            fills = moment.before and (done or made is None or made > 1)
            before = self.hold.reduce * min(self.bucket, self.in_buckets) if fills else 0.0
            return self.tied_head(moment) + self.buckets(1) + self.in_loss(moment) + before
        reduced = self.reduced(moment, done) + self.made(run, made)
        leaving = self._on_their_way(reduced)
        if self.leaving and not self.apart:
            return self.tied_head(moment) + self._flying(reduced) + leaving
        if self.apart and run.experts:
            return self.tied_head(moment) + self._while_experts(moment, done, made) + leaving
        return self.tied_head(moment) + self.buckets(2) + leaving

    def blocks_looked_at(self, run: BlockRun, done: int) -> list[int]:
        """If gradients leave, also the first and the last block beside which most is in flight."""
        found = super().blocks_looked_at(run, done)
        if not self.leaving:
            return found
        each, before = max(1, run.block.trained), 0 if self.model.tied else self.ends.head.trained
        # As a bucket is full, and as the next one fills.
        ends = self._ends_of_buckets[:-1]
        near = set()
        for points in (ends, [end + 1 for end in ends]):
            sizes = [self._flying(point) + self._on_their_way(point) for point in points]
            most = [point for point, size in zip(points, sizes, strict=True) if size == max(sizes)]
            near |= {-int((before - point) // each) - 1 - done for point in most[:1] + most[-1:]}
        return sorted({*found, *(one for one in near if 0 <= one < run.layers)})

    def _at_full_buckets(self, moment: Moment, run: BlockRun, done: int) -> Iterator[float]:
        """Beyond ``in_block`` at its first gradient: as each of this block's buckets is full and sent, and copies leave
        of the one that landed."""
        begun, over = self.reduced(moment, done), self.reduced(moment, done + 1)
        counted = self.in_block(moment, run, done, 1) - self.tied_head(moment)
        for end in self._ends_of_buckets:
            if begun < end <= over:
                yield self._flying(end) + self._on_their_way(end) - counted

    def _on_their_way(self, reduced: float) -> float:
        """Bytes of reduced gradients on their way to the host once so many elements' exist: of the two buckets that
        landed last. The last full one has not landed yet."""
        if not self.leaving:
            return 0.0
        landed = bisect_right(self._ends_of_buckets, reduced) - 1
        return self.hold.reduce * sum(
            one.leaving for one in self._buckets[max(0, landed - IN_FLIGHT) : max(0, landed)]
        )

    def _flying(self, reduced: float) -> float:
        """The last full bucket, being sent, and the one that fills; or, as one is full, the one before, which lands."""
        full = bisect_right(self._ends_of_buckets, reduced)
        sizes = [one.elements for one in self._buckets]
        beside = full - 2 if full and self._ends_of_buckets[full - 1] == reduced else full
        return self.hold.reduce * sum(sizes[one] for one in (full - 1, beside) if 0 <= one < len(sizes))

    @cached_property
    def _buckets(self) -> list[LeavingBucket]:
        return leaving_buckets(self.rank.workload, self.rank.shard)

    @cached_property
    def _ends_of_buckets(self) -> list[int]:
        """How many elements' gradients exist once each bucket is full."""
        return list(accumulate(one.elements for one in self._buckets))

    def first_product(
        self, moment: Moment, run: BlockRun, done: int, block: BlockActivations
    ) -> Iterator[tuple[float, float]]:
        found = list(super().first_product(moment, run, done, block))
        if self.leaving and not self.apart:
            yield from ((size, 0.0) for size in self._at_full_buckets(moment, run, done))
            # A later product beside a bucket that has been sent meanwhile.
            first = self.in_block(moment, run, done, 1)
            for made in (2, 3):
                more = self.in_block(moment, run, done, made) - first
                yield from ((size + more, gone) for size, gone in found if more > 0)
        if not (self.in_buckets and run.experts and len(found) > 1):
            yield from found
            return
        # The experts' first gradient: at its product, then accumulated and copied into its bucket; then the second one.
        # If these are the first of all, what ``in_block`` counts is not in flight yet.
        (product, gone), (added, released), *later = found
        flying = 0.0 if done or moment.before else -self.hold.reduce * self._of_experts(2)
        yield product + flying, gone
        copied = added - (0.0 if self.hold.cast else product) + self.hold.reduce * self._of_experts(1)
        yield max(added, copied) + flying, released
        yield from later

    def _while_experts(self, moment: Moment, done: int, made: float | None) -> float:
        """Two queues: while experts' gradients are made, no other bucket is sent. The bucket sent last is still in
        flight: the head's, or an attention matrix of the next block. The experts' last bucket, of their ways in, is in
        flight until their next one is sent.
        """
        dense = min((2 if made is None else 1) * self.dense_bucket, self.others - self.apart)
        if not done and made is not None:
            dense = round(self.head_bucket / self.hold.reduce) or dense
        first = made == 0 and not done and not moment.before
        experts = 0 if first else self._of_experts(2)
        return self.hold.reduce * (dense + experts)

    def _of_experts(self, ways: int) -> float:
        """Elements in buckets of their ways out (1), or of their ways in, twice as large (2)."""
        return min(ways * max(self.bucket, self.down[True]), self.in_buckets)

    def buckets(self, count: int) -> float:
        """Routed experts have buckets of their own."""
        largest = max(self.bucket, *self.down)
        elements = sum(min(count * largest, one) for one in (self.others - self.apart, self.in_buckets))
        return self.hold.reduce * elements

    def in_embedding(self, moment: Moment, left: Peak, entering: float) -> Iterator[Peak]:
        product, widened = self.of_table
        left = left.plus("embedding", buffers=self._on_their_way(self.others))
        if self.model.tied:
            yield left.plus(
                "embedding", activations=entering, buffers=self.tied_head(moment) + product + widened
            )
        yield left.plus(
            "embedding",
            activations=0.0 if self.model.tied else entering,
            buffers=(widened or product) + self.hold.reduce * self.ends.embedding.trained + self.buckets(1),
        )

    def at_end(self, batch: Peak) -> Iterator[Peak]:
        yield from ()
