"""tune.optimizer_in_backward on one data rank: a gradient is used up as soon as it has been computed.

What data ranks sum is used up as it is summed: ``zero`` and ``shard``.
"""

from __future__ import annotations

from shoal.predict.memory.gradients import RankGradients
from shoal.predict.memory.in_flight import Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory


class ConsumedGradients(RankGradients):
    alone = piecemeal = False

    def __init__(self, rank: RankInventory) -> None:
        super().__init__(rank)
        self.stay = 0.0

    def held(self, moment: Moment, done: int | None, made: int = 0) -> float:
        return 0.0

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: float | None) -> float:
        return self.tied_head(moment)
