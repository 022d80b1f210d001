"""Gradient memory under offload=optimizer on one data rank: gradients move to the host as they are computed.

While a block's gradients are computed, the previous block's are in transit. Reduced gradients leave after their
reduction: see ``zero`` (all but zero=3) and ``shard``. In a pipeline, gradients accumulate on the device until the end
of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.predict.memory.block_workload import BlockActivations
from shoal.predict.memory.gradients import RankGradients
from shoal.predict.memory.in_flight import Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory
from shoal.predict.memory.peak import Peak
from shoal.predict.rank_parameters import rank_parameters, trained


class LeavingGradients(RankGradients):
    """Early gradients leave; with a fraction, the network's first parameters, whose gradients come last, stay."""

    alone = False

    def __init__(self, rank: RankInventory) -> None:
        super().__init__(rank)
        self.stay, self.handed_on = 1.0 - rank.offloaded("optimizer"), self.hold.compute
        # Gradients summed with other ranks at the end of a step stay on the device until then.
        shared = self._summed_at_the_end() if self.adapters_only else 0.0
        self.away = (self.total.trained - shared) * rank.offloaded("optimizer")

    def _summed_at_the_end(self) -> float:
        workload = self.rank.workload
        here = rank_parameters(workload.layout, workload.model, workload.cut_by, self.rank.number)
        _, over_tensor, over_copies = trained(workload, here)
        return float(over_tensor + over_copies)

    def blocks_looked_at(self, run: BlockRun, done: int) -> list[int]:
        """Also the first two blocks: the head's gradients are in transit at the first, a whole block's at the next."""
        return sorted({*super().blocks_looked_at(run, done), min(1, run.layers - 1)})

    def held(self, moment: Moment, done: int | None, made: int = 0) -> float:
        return max(0.0, super().held(moment, done, made) - self.width * self.away)

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: float | None) -> float:
        """In transit: this block's gradients so far, and all of the previous block's, or at first the head's."""
        if self.adapters_only:
            return 0.0
        before = self._arrived(moment, done)
        previous = run.block.trained if done else before
        leaving = self._leaving(before - previous, previous) + self._leaving(before, self.made(run, made))
        return self.tied_head(moment) + self.hold.compute * leaving

    def _arrived(self, moment: Moment, done: int) -> int:
        stage, ends = self.stage(moment), self.ends
        at_end = ends.norm.trained + (0 if self.model.tied else ends.head.trained) if stage.last else 0
        return at_end + stage.last_blocks(done).trained

    def _leaving(self, before: float, count: float) -> float:
        """Of the ``count`` gradients that follow the first ``before``, those that leave."""
        return max(0.0, min(count, self.away - before))

    def first_product(
        self, moment: Moment, run: BlockRun, done: int, block: BlockActivations
    ) -> Iterator[tuple[float, float]]:
        """Gradients that leave are not widened here."""
        if self.stay:
            yield from super().first_product(moment, run, done, block)
        yield 0.0, 0.0

    @property
    def of_table(self) -> tuple[float, float]:
        return super().of_table if self.stay else (self.hold.compute * self.table, 0.0)

    def in_embedding(self, moment: Moment, left: Peak, entering: float) -> Iterator[Peak]:
        before, run = self._arrived(moment, self.stage(moment).layers), self.stage(moment).runs[0]
        leaving = 0.0 if self.adapters_only else self._leaving(before - run.block.trained, run.block.trained)
        yield from super().in_embedding(
            moment, left.plus("embedding", buffers=self.hold.compute * leaving), entering
        )
