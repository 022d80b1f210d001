"""Gradient memory with full gradients allocated from the start: replicas (dp), zero=1, and zero=2 in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.predict.memory.gradients import RankGradients
from shoal.predict.memory.in_flight import Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory
from shoal.predict.memory.peak import Peak


class ReplicatedGradients(RankGradients):
    """If reduced in another precision, each bucket is sent as a copy, and all copies live until the end of the step."""

    alone = piecemeal = False

    def __init__(self, rank: RankInventory) -> None:
        super().__init__(rank)
        self.travels_as_copy = self.hold.reduce != self.hold.gradient
        self.scatters = self.layout.zero == 2 and self.layout.shards > 1
        if self.scatters:
            # In a pipeline, full gradients accumulate until the end of the step, in addition to this rank's shard.
            self.standing = self.hold.gradient * self.total.trained

    def held(self, moment: Moment, done: int | None, made: int = 0) -> float:
        if not self.rank.lone_experts or moment.before:
            return self.complete
        left = 1 - self.stage(moment).share_of_experts(done or 0)
        missing = self.hold.gradient * self.stay * max(0.0, self.rank.lone_experts * left - made)
        return max(0.0, self.complete - missing)

    def copies(self, count: float) -> float:
        return self.hold.reduce * count if self.travels_as_copy and self.layout.pp == 1 else 0.0

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: float | None) -> float:
        return self.tied_head(moment) + self.copies(self.reduced(moment, done))

    def reduced(self, moment: Moment, done: int) -> float:
        """Parameters whose gradients are complete after ``done`` blocks."""
        stage = self.stage(moment)
        summed = stage.last_blocks(done).trained
        if self.rank.lone_experts:
            summed -= round(self.rank.lone_experts * stage.share_of_experts(done))
        return (0 if self.model.tied else self.ends.head.trained) + summed

    def at_end(self, batch: Peak) -> Iterator[Peak]:
        if not self.travels_as_copy:
            return
        hold, rank = self.hold, self.rank
        copies = hold.reduce * (self.total.trained - rank.lone_experts)
        yield batch.plus("reduce", grads=self.complete, buffers=copies)
        if not self.scatters:
            # The embedding's gradient is computed and not yet copied.
            table = self.ends.embedding.trained if rank.stages[0].first else 0
            left = rank.micro_batch.stream
            if not self.of_table[1]:
                left += rank.micro_batch.norm_backward
            buffers = copies - hold.reduce * table + (sum(self.of_table) if table else 0.0)
            yield batch.plus("reduce", grads=self.complete, activations=left, buffers=buffers)
        elif rank.stages[-1].last and not self.adapters_only:
            # A bucket is freed once it is copied. The first one is the head's.
            left = rank.in_flight[-1].blocks + rank.in_flight[-1].others
            buffers = self.standing + hold.reduce * self.ends.head.trained
            yield batch.plus("reduce", grads=self.complete, activations=left, buffers=buffers)
