"""Gradient memory under zero=2 without a pipeline: this rank's shard from the start, plus a few buckets in flight.

If reduced gradients move to the host right away, only the part of the shard that stays on the device counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.layout.offload import IN_FLIGHT, leaves_early
from shoal.facts.model.parameters import EMBEDDING
from shoal.predict.memory.in_flight import Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory
from shoal.predict.memory.peak import Peak
from shoal.predict.memory.replicate import ReplicatedGradients
from shoal.predict.rank_parameters import expert_elements, rank_parameters


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
        self.apart = 0
        if self.layout.ep > 1 and self.model.experts is not None and not self.adapters_only:
            layers = sum(run.layers for one in rank.stages for run in one.runs if run.experts)
            self.apart = layers * expert_elements(self.model, self.layout.tp, self.layout.ep)
        # Of these, parameters that may share a bucket with the first gradients, the head's and final norm's.
        self.with_head = self._with_head() if rank.workload.recipe.blockwise else self.others
        if not self.model.tied:
            head = self.ends.head.trained
            bucket = self.hold.reduce * min(max(self.bucket, head), self.with_head)
            # A cast product has been freed by then.
            self.head_bucket = bucket

    def _with_head(self) -> int:
        """With blockwise moments, only parameters of the same block length share a bucket."""
        workload = self.rank.workload
        here = rank_parameters(workload.layout, workload.model, workload.cut_by, self.rank.number)
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
        """One bucket fills while one is in flight; while the first one fills, it may be the last one of the previous
        pass.
        """
        if not done and made == 0:
            return (
                self.tied_head(moment)
                + min(self.buckets(1), self.hold.reduce * self.with_head)
                + self.in_loss(moment)
            )
        if self.reduced(moment, done) + self.made(run, made) <= self.bucket:
            # The same holds for the experts' bucket of the previous pass; by then the next one is filling.
            fills = moment.before and (done or made is None or made > 1)
            before = self.hold.reduce * min(self.bucket, self.apart) if fills else 0.0
            return self.tied_head(moment) + self.buckets(1) + self.in_loss(moment) + before
        # Reduced gradients on their way to the host, at most two buckets of them.
        landed = int((self.reduced(moment, done) + self.made(run, made)) / max(self.bucket, *self.down)) - 1
        leaving = (
            self.leaving * self.buckets(min(landed, IN_FLIGHT)) / self.layout.shards if landed > 0 else 0.0
        )
        return self.tied_head(moment) + self.buckets(2) + leaving

    def buckets(self, count: int) -> float:
        """Expert buckets count separately, since fewer ranks hold the same experts."""
        largest = max(self.bucket, *self.down)
        elements = sum(min(count * largest, one) for one in (self.others - self.apart, self.apart))
        return self.hold.reduce * elements

    def in_embedding(self, moment: Moment, left: Peak, entering: float) -> Iterator[Peak]:
        product, widened = self.of_table
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
