"""Device memory of fetched weights under offload=params: weights that live in host memory and are briefly on the
device.

Present at a time: the block being computed and the next one; the head with the last block; in a pipeline, its last
block alone. FSDP all-gathers as always (``shard``): fetched shards are freed before the gathered buffer is unpacked.
"""

from __future__ import annotations

from functools import cached_property

from shoal.predict.memory.inventory import RankInventory, RankStage
from shoal.predict.rank_parameters import ParameterCount


class FetchedWeights:
    """Bytes of fetched weights on one pipeline rank."""

    def __init__(self, rank: RankInventory) -> None:
        self.rank, self.share = rank, rank.offloaded("params")

    def in_forward(self, number: int) -> float:
        """In the last block of a stage's forward pass."""
        return self._block(number, self._stage(number).layers - 1) + self._ends(number)

    def in_loss(self, number: int) -> float:
        return self.in_forward(number)

    def in_block(self, number: int, block: int) -> float:
        """In the backward pass of a block, given its index in the stage."""
        return self._block(number, block) + (self._block(number, block - 1) if block else 0.0)

    def in_embedding(self, number: int) -> float:
        """The first block's weights are still there."""
        return self._block(number, 0)

    def looked_at(self, number: int) -> set[int]:
        """Blocks that may have the most fetched weights: the second, and the first two that are offloaded."""
        if not self.share:
            return set()
        layers = self._stage(number).layers
        first = next((one for one in range(layers) if self._block(number, one)), layers)
        return {1, first, first + 1}

    def gathering(self) -> float:
        """The largest bucket, as data ranks that update shards all-gather whole weights."""
        layout, tune = self.rank.workload.layout, self.rank.workload.tune
        if not self.share or self.rank.sharded or layout.shards == 1:
            return 0.0
        hold, ends = self.rank.hold, self.rank.ends
        largest = max(tune.bucket_mb * 2**20 / hold.gradient, ends.embedding.whole, ends.head.whole)
        return hold.compute * min(largest, self.rank.total.whole)

    def _stage(self, number: int) -> RankStage:
        return self.rank.stages[number]

    def _ends(self, number: int) -> float:
        """The network's end: the final norm, and the head or the tied matrix."""
        if not self._stage(number).last or not self.share or self.rank.sharded:
            return 0.0
        ends, size = self.rank.ends, self.rank.hold.compute
        if self.rank.workload.model.tied and self.rank.workload.layout.pp == 1:
            return size * (ends.norm.whole + (ends.head.whole if self.share == 1.0 else 0))
        return size * (ends.norm.whole + ends.head.whole)

    def _block(self, number: int, block: int) -> float:
        if not self.share:
            return 0.0
        away = max(
            0.0, min(self._ends_at[number][block] - self._stay, self._here(self._count(number, block)))
        )
        if self.rank.sharded:
            experts = self.rank.whole_experts if self._has_experts(number, block) else 0
            away = min(away, experts)
        return self._width(self._count(number, block)) * away

    @cached_property
    def _stay(self) -> float:
        """Elements that stay on the device: the first ones of the network."""
        return (1 - self.share) * sum(
            self._here(count) for one in self.rank.stages for count in (one.blocks, one.ends)
        )

    @cached_property
    def _ends_at(self) -> list[list[float]]:
        """For each block of each stage, the cumulative number of this rank's elements up to its end."""
        seen, found = 0.0, []
        for number, stage in enumerate(self.rank.stages):
            seen += self._here(self.rank.ends.embedding) if stage.first else 0
            each = []
            for block in range(stage.layers):
                seen += self._here(self._count(number, block))
                each.append(seen)
            found.append(each)
            after = self._here(stage.ends) - (self._here(self.rank.ends.embedding) if stage.first else 0)
            seen += after
        return found

    def _here(self, count: ParameterCount) -> int:
        adapters = self.rank.workload.lora is not None  # counted as trained alone
        if self.rank.sharded:
            return count.share + adapters * count.trained_share
        return count.whole + adapters * count.trained

    def _width(self, count: ParameterCount) -> float:
        """Average bytes per element: a base model in NF4 is fetched as stored."""
        if self.rank.workload.lora is None:
            return self.rank.hold.compute
        if self.rank.sharded:  # only unsharded routed experts are fetched
            packed = self.rank.workload.lora.base == "nf4"
            return self.rank.workload.gathered_width if packed else self.rank.hold.compute
        return self.rank.gathered(count) / max(1, self._here(count))

    def _count(self, number: int, block: int) -> ParameterCount:
        return self.rank.run_of(number, block).block

    def _has_experts(self, number: int, block: int) -> bool:
        return self.rank.run_of(number, block).experts
