"""Gradient memory of tune.optimizer_in_backward on one data rank: each gradient is applied and freed as soon as it is
computed.

Gradients reduced over data ranks are applied once reduced: see ``zero`` and ``shard``.
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
