"""Gradient and gathered-weight memory under zero=3: sharded gradients accumulate while units of weights are
all-gathered and units of full gradients are reduce-scattered.

In a pipeline, weights and gradients stay whole until the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from shoal.facts.layout.buckets import even_share, sharded_dimension
from shoal.facts.layout.offload import IN_FLIGHT
from shoal.facts.layout.parameter_groups import EXPERTS
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.predict.memory.block_workload import BlockActivations
from shoal.predict.memory.gradients import RankGradients
from shoal.predict.memory.in_flight import Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory, RankStage
from shoal.predict.memory.peak import Peak
from shoal.predict.rank_parameters import ParameterCount, expert_elements, total


class UnitOfBlocks(NamedTuple):
    """The FSDP unit of the block whose backward pass comes next."""

    blocks: int  # blocks in the unit
    done: int  # of these, blocks whose backward pass is over


def next_unit(stage: RankStage, done: int, unit: int) -> UnitOfBlocks:
    """The unit after ``done`` blocks; the last unit of a stage may be incomplete."""
    block = max(0, stage.layers - 1 - done)
    first = block // unit * unit
    blocks = min(unit, stage.layers - first)
    return UnitOfBlocks(blocks, first + blocks - 1 - block if done < stage.layers else 0)


class ShardedGradients(RankGradients):
    """zero=3 without a pipeline, so the rank has one stage."""

    alone = False

    def __init__(self, rank: RankInventory, partial: bool = False) -> None:
        super().__init__(rank)
        self.one, self.unit = rank.stages[0], self.layout.unit
        # With replicas (HSDP): a pass between the first and the last, in which replicas do not reduce.
        self.partial = partial
        # Whether units are freed between forward and backward.
        first = self.unit * self.one.runs[0].block.whole
        self.frees = self.layout.zero == 3 and self.tune.persist_below <= first
        self.handed_on, self.stay = self.hold.compute, 1.0 - rank.offloaded("optimizer")
        # How many of this rank's gradients leave for the host: those of the last parameters, which arrive first.
        self.away = self.total.trained_share * (1.0 - self.stay)
        # Replicas of shards reduce gradients in another precision than the one they are stored in, or leave in.
        sums = self.layout.dp > 1 and not self.adapters_only
        # Those that stay are copied where the update has master weights, and in a unit that others leave.
        away, reduce = self.away > 0, self.hold.reduce
        self.copies_kept = reduce != self.hold.gradient or (away and reduce != self.hold.compute)
        self.casts_kept = sums and self.copies_kept
        self.cast_sums = sums if away else self.casts_kept
        # With several passes, replicas accumulate reduced gradients here in the reduction precision; these leave in
        # the last pass.
        self.waits = self.layout.dp > 1 and self.stay < 1 and rank.workload.accumulation > 1
        if self.tune.optimizer_in_backward:
            self.stay = 0.0
        # Stays gathered from forward to backward: the head, or the tied matrix.
        self.root = self.ends.embedding.whole if self.model.tied else self.ends.head.whole
        if self.frees:
            last, head = self.one.runs[-1], self.ends.head.whole
            # In the forward pass FSDP also keeps the last flat all-gather buffer until the next all-gather.
            of_head = self.hold.compute * head
            self.behind = rank.gathered(self._full_unit(last)) if self.model.tied else of_head
            if not self.model.tied:
                # The unit before the head, and the head, each with its flat buffer.
                self.gathering_head = 2 * (rank.gathered(self._unit(last, 0)) + of_head)

    def passes(self) -> Iterator[RankGradients]:
        """Replicas accumulate in the reduction precision, and cast the reduced gradients in the last pass."""
        if (self.cast_sums or self.waits) and self.rank.workload.accumulation > 2:
            yield ShardedGradients(self.rank, partial=True)
        yield self

    def held(self, moment: Moment, done: int | None, made: int = 0) -> float:
        if not moment.before:
            # Gradients of unsharded experts are in buckets of their own from the start; if no other rank has these
            # experts, each is allocated as it is computed.
            waiting = 0 if self.adapters_only else self.rank.all_whole_experts - self.rank.lone_experts
            waiting -= round(waiting * self.one.share_of_experts(self._blocks_arrived(done)))
            if self.rank.lone_experts and done is not None and done < self.one.layers:
                here = self.rank.run_of(0, self.one.layers - 1 - done).experts
                waiting += min(made, self.rank.whole_experts) * here
            if self.waits:
                return self.hold.reduce * (self._arrived(done) + waiting)
            return self.hold.gradient * (self._kept(0, self._arrived(done)) + self.stay * waiting)
        everything = self.total.trained_share * self.stay
        if self.waits:
            left = 0 if self.partial else self._arrived(done)
            return self.hold.gradient * self._kept(0, left) + self.hold.reduce * (
                self.total.trained_share - left
            )
        if not self.cast_sums:
            return self.hold.gradient * everything
        cast = 0.0 if self.partial else self._kept(0, self._arrived(done))
        return self.hold.gradient * cast + self.hold.reduce * (everything - cast)

    def _arrived(self, done: int | None) -> int:
        """Parameters in this rank's shard whose gradients the first backward pass has produced so far."""
        if done is None:
            return 0
        stage, ends, units = self.one, self.ends, self._blocks_arrived(done)
        # A tied matrix is one unit with the embedding, whose gradient comes at the very end.
        arrived = ends.norm.trained_share + (0 if self.model.tied else ends.head.trained_share)
        return arrived + stage.last_blocks(units).trained_share

    def _leaving(self, before: int, count: int) -> float:
        """Of the ``count`` gradients that come after so many, those that leave the device."""
        return max(0.0, min(count, self.away - before))

    def _kept(self, before: int, count: int) -> float:
        """And those that stay, for the update at the end of the step."""
        return (count - self._leaving(before, count)) if self.stay else 0.0

    def _blocks_arrived(self, done: int | None) -> int:
        return 0 if done is None else done - next_unit(self.one, done, self.unit).done

    def in_other_streams(self, grads: float) -> float:
        """torch's allocator has a pool per stream, so gradients cannot reuse memory that the compute stream frees."""
        if self.adapters_only:
            return 0.0
        unit = self._full_unit(self.one.runs[-1])
        ahead = self.rank.gathered(unit) * self.tune.prefetch
        return max(0.0, self.complete - grads) + self.hold.reduce * unit.whole + ahead

    # Gathered weights.

    def in_loss(self, moment: Moment) -> float:
        """The last unit and the head; prefetching starts at the first backward hook.

        Sharded experts are freed as their block's forward pass ends, in every block.
        """
        if not self.frees:
            return self.rank.gathered(self.total)
        last, ahead = self.one.runs[-1], max(1, self.tune.prefetch) - 1
        units = self.rank.gathered(self._unit(last, 0)) + self.rank.gathered(self._full_unit(last)) * ahead
        units -= self.hold.compute * self._apart(last, 0)
        return self.hold.compute * self.root + units

    def _gathered(self, run: BlockRun, done: int) -> float:
        """The current unit, the prefetched units that exist, and a tied matrix."""
        if not self.frees:
            return self.rank.gathered(self.total)
        gathered = self.hold.compute * self.root if self.model.tied else 0.0
        if done < self.one.layers:
            first = next_unit(self.one, done, self.unit)
            gathered += self.rank.gathered(self._unit(run, done))
            left = self.one.layers - done - first.blocks + first.done  # blocks before this unit
            for _ in range(min(left // self.unit, self.tune.prefetch)):
                blocks = range(left - self.unit, left)
                gathered += sum(self.rank.gathered(self._block(self.rank.run_of(0, one))) for one in blocks)
                left -= self.unit
        return gathered

    def _full_unit(self, run: BlockRun) -> ParameterCount:
        return self._block(run).times(min(self.unit, run.layers))

    def _unit(self, run: BlockRun, done: int) -> ParameterCount:
        return self._block(run).times(next_unit(self.one, done, self.unit).blocks)

    def _block(self, run: BlockRun) -> ParameterCount:
        """What one block all-gathers and reduces, without unsharded experts, which are resident."""
        there = self.rank.whole_experts if run.experts else 0
        count = run.block
        return count._replace(
            whole=count.whole - there,
            trained_share=count.trained_share - there,
            projections=count.projections - (count.packed_experts if there else 0),
        )

    def _apart(self, run: BlockRun, done: int) -> int:
        """Elements of a unit's sharded experts: gathered with the unit, but reduced before it."""
        if not run.experts or self.rank.whole_experts:
            return 0
        each = expert_elements(self.model, self.layout.tp, self.layout.ep)
        return each * next_unit(self.one, done, self.unit).blocks

    @cached_property
    def _within_experts(self) -> tuple[int, int]:
        """Elements of a layer's matrices into and out of experts that are sharded by rows of every expert, instead of
        whole matrices per rank; 0 if they are not.

        The ways in, gate and up, are twice as many matrices, which more ranks divide.
        """
        ranks, model = self.rank.workload.groups[EXPERTS].sharded.size, self.model
        here = model.experts.count // self.layout.ep if model.experts else 1
        width = even_share(model.experts.ffn, self.layout.tp) if model.experts else 1
        ways_in = sharded_dimension((2 * here, width, model.hidden), ranks)
        return 2 * self.down[True] * ways_in, self.down[True] * sharded_dimension(
            (here, model.hidden, width), ranks
        )

    # Gradients in flight.

    def in_norm(self, moment: Moment) -> float:
        """The head's gradient is being reduced."""
        last = self.one.runs[-1]
        head = 0.0 if self.model.tied else self.hold.reduce * self.ends.head.trained
        passing = head + self.tied_head(moment) + self._landing(last, 0)
        return self._gathered(last, 0) + passing

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: float | None) -> float:
        """Gradients of this unit's later blocks so far, while the previous unit is being reduced."""
        gathered, of_unit = self._gathered(run, done), next_unit(self.one, done, self.unit).done
        if self.adapters_only:
            return gathered
        if done > of_unit:
            before = self._unit(run, done - of_unit - 1).whole - self._apart(run, done - of_unit - 1)
        else:
            before = 0 if self.model.tied else self.ends.head.trained + self.ends.norm.trained
        own = self.hold.compute * (of_unit * self._block(run).whole + self._waiting(run, made))
        return gathered + own + self.hold.reduce * before + self.tied_head(moment) + self._landing(run, done)

    def _waiting(self, run: BlockRun, made: float | None) -> int:
        """Elements of a block's first gradients that wait for the rest of their unit; unsharded experts' do not."""
        if not (run.experts and self.rank.whole_experts):
            return self.made(run, made)
        return self._block(run).whole if made is None else 0

    def _landing(self, run: BlockRun, done: int, count: int = 2) -> float:
        """Reduced gradients of the two previous units: replicas' sums still in the reduction precision, and those on
        their way to the host."""
        if self.partial or not (self.cast_sums or self.away):
            return 0.0
        sums: list[tuple[int, int]] = []  # what came before, and how many come then
        done -= next_unit(self.one, done, self.unit).done
        while done and len(sums) < count:
            blocks = next_unit(self.one, done - 1, self.unit).blocks
            sums.append((self._arrived(done - blocks), self._block(run).trained_share * blocks))
            done -= blocks
        if not self.model.tied:
            sums.append((0, self.ends.head.trained_share))
        held = 0.0
        for number, (before, landed) in enumerate(sums[:count]):
            leaving = self._leaving(before, landed)
            cast = landed if self.cast_sums and (leaving or self.casts_kept) else 0.0
            # Those of two blocks may be on their way, which are one unit where it has as many. A unit that a fraction
            # cuts is one buffer, so without replicas all of it stays as long as its last gradient that leaves.
            going = leaving if self.layout.dp > 1 else landed if leaving else 0.0
            going = going if number * self.unit < IN_FLIGHT else 0.0
            held += self.hold.reduce * cast + self.hold.compute * going
        return held

    def _summed(self, moment: Moment, before: int, share: int) -> tuple[float, float]:
        """A unit's reduced gradient as it arrives after ``before`` elements: the bytes that are stored, and those that
        are freed again."""
        hold = self.hold
        cast = self.copies_kept
        kept, travelled = hold.gradient * self._kept(before, share), hold.reduce * share
        if self.partial:
            return 0.0, travelled
        if moment.before and self.layout.dp == 1:
            return 0.0, travelled + (kept if cast else 0.0)
        return kept, travelled if cast else 0.0

    # Candidate peaks.

    def first_product(
        self, moment: Moment, run: BlockRun, done: int, block: BlockActivations
    ) -> Iterator[tuple[float, float]]:
        """Only unsharded experts accumulate one by one."""
        if run.experts and self.rank.whole_experts:
            yield from super().first_product(moment, run, done, block)
        else:
            yield 0.0, 0.0

    def added_up(self, product: float, added: float, block: BlockActivations) -> tuple[float, float]:
        """The widened gradient of unsharded experts, whose weights are not cast."""
        return product + added, block.released or block.put_off

    def blocks_looked_at(self, run: BlockRun, done: int) -> list[int]:
        """Blocks near the ends too, because inner blocks have more gathered and in flight than the outermost ones.

        With several blocks per unit, a unit ends with its first block. The candidate peaks are the first two units to
        arrive, and the last two with others ahead of them.
        """
        last, unit = run.layers - 1, self.unit
        found = {0, 1, last - 1, (self.one.layers - 1 - done) % unit}
        if unit > 1:
            found |= {
                (self.one.layers - 1 - done) % unit + unit,
                last - unit,
                last - unit * self.tune.prefetch,
            }
        if unit > 1 or self.cast_sums or self.away:
            found |= {2, last}
        if 0 < self.stay < 1:
            # Beside the first gradients that stay, and the last that leave.
            each = max(1, self._block(run).trained_share)
            cut = int(max(0.0, self.away - self._arrived(0)) // each) - done
            found |= set(range(cut - unit, cut + 2 * unit + 2))
        return sorted({max(0, min(one, last)) for one in found})

    def after_head(self, moment: Moment, left: Peak) -> Iterator[Peak]:
        if self.adapters_only or self.model.tied:
            return
        hold, head = self.hold, self.ends.head
        stays, going = self._summed(moment, 0, head.trained_share)
        gathered = self.in_loss(moment) - (hold.compute * head.whole if self.frees else 0.0)
        passing = gathered + (hold.compute + hold.reduce) * head.trained + going
        yield left.plus("head", grads=stays, buffers=passing)

    def before_experts(self, moment: Moment, run: BlockRun, done: int, left: Peak) -> Iterator[Peak]:
        """Sharded experts are copied out of the flat all-gather buffer, rank by rank.

        When sharded within experts, this takes another copy of each matrix; all are freed once the last is in place.
        """
        if not (self.frees and self._apart(run, done)):
            return
        blocks = next_unit(self.one, done, self.unit).blocks
        copies = self.hold.compute * (self._apart(run, done) + sum(self._within_experts) * blocks)
        yield left.plus(
            left.name, grads=self.held(moment, done), buffers=copies + self.in_block(moment, run, done, 0)
        )

    def after_experts(
        self, moment: Moment, run: BlockRun, done: int, block: BlockActivations, left: Peak
    ) -> Iterator[Peak]:
        """Reduction of a unit's routed experts, no longer gathered: their gradients, and the copy being sent."""
        last = (self.one.layers - 1 - done) % self.unit == 0
        if not (apart := self._apart(run, done)) or not last or self.adapters_only:
            return
        freed = self.hold.compute * apart if self.frees else 0.0
        passing = self._gathered(run, done) - freed + self.tied_head(moment) + self._landing(run, done)
        passing += (self.hold.compute + self.hold.reduce) * apart
        # Within experts, each gradient is rearranged by rank and then freed; the last one when all are sent.
        ways_in, way_out = self._within_experts
        passing += self.hold.compute * (way_out or ways_in)
        yield left.plus(
            left.name, grads=self.held(moment, done), activations=block.after_experts, buffers=passing
        )

    def after_block(self, moment: Moment, run: BlockRun, done: int, left: Peak) -> Iterator[Peak]:
        """A unit is reduced while the next unit, already gathered, is copied out of its flat buffer."""
        if (self.one.layers - 1 - done) % self.unit:
            return
        hold, grads, name = self.hold, self.held(moment, done), left.name
        following, kept = 0.0, self._gathered(run, self.one.layers)
        if self.frees and done + 1 < self.one.layers:
            following = self.rank.gathered(self._unit(run, done + 1))
        if self.adapters_only:
            yield left.plus(name, grads=grads, buffers=kept + 2 * following)
            return
        unit, blocks = (
            self._unit(run, done).whole - self._apart(run, done),
            next_unit(self.one, done, self.unit).blocks,
        )
        passing = kept + following + hold.reduce * unit + self.tied_head(moment)
        # The unit's full gradients and the copy being sent; then that copy and this rank's reduced shard.
        whole = hold.compute * unit + self._landing(run, done)
        yield left.plus(name, grads=grads, buffers=passing + whole)
        stays, going = self._summed(moment, self._arrived(done), self._block(run).trained_share * blocks)
        going += self._landing(run, done, 1)
        if self.rank.lone_experts and run.experts and not moment.before:
            stays += hold.gradient * self.rank.whole_experts * blocks * self.stay
        yield left.plus(name, grads=grads + stays, buffers=passing + going)
        landing = self._landing(run, done + 1)
        yield left.plus(name, grads=self.held(moment, done + 1), buffers=passing + following + landing)

    def in_embedding(self, moment: Moment, left: Peak, entering: float) -> Iterator[Peak]:
        hold, table, layers, run = self.hold, self.ends.embedding, self.one.layers, self.one.runs[0]
        kept = self._gathered(run, layers)
        before = self._unit(run, layers - 1).whole - self._apart(run, layers - 1)
        before = 0 if self.adapters_only else hold.reduce * before
        passing = kept + before + hold.compute * table.trained + self.tied_head(moment)
        passing += self._landing(run, layers)
        yield left.plus("embedding", activations=entering, buffers=passing)
        stays, passing = self._summed(moment, self._arrived(layers), table.trained_share)
        # What is being reduced is no longer gathered; a reduced gradient is freed as it is cast.
        passing += (0.0 if self.frees else kept) + hold.reduce * table.trained
        passing += 0.0 if self.model.tied else hold.compute * table.trained
        yield left.plus("embedding", grads=stays, buffers=passing + self._landing(run, layers, 1))


class PipelinedShards(RankGradients):
    """zero=3 in a pipeline: units stay gathered, and full gradients accumulate in the reduction precision."""

    alone = False

    def __init__(self, rank: RankInventory) -> None:
        super().__init__(rank)
        self.width, self.widens = self.hold.reduce, self.hold.compute != self.hold.reduce
        # Unsharded experts are resident, or fetched.
        there = ParameterCount(whole=rank.all_whole_experts)
        if there.whole:
            there = there._replace(projections=self.total.packed_experts)
        self.gathered = rank.gathered(self.total) - rank.gathered(there)

    def in_loss(self, moment: Moment) -> float:
        return self.gathered

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: float | None) -> float:
        return self.gathered

    def added_up(self, product: float, added: float, block: BlockActivations) -> tuple[float, float]:
        """The weight half of a split backward pass widens its gradient itself, before its input is freed."""
        return product + added, 0.0 if self.layout.schedule in SPLIT_BACKWARD else block.put_off

    def _widened(self, moment: Moment, matrix: int, left: Peak) -> Iterator[Peak]:
        """A gradient and its copy widened for accumulation, which in the first pass becomes the gradient itself."""
        if not self.widens:
            return
        product, widened = self.hold.compute * matrix, self.hold.reduce * matrix
        grads, buffers = (0.0, product + widened) if moment.before else (widened, product)
        yield left.plus(left.name, grads=grads, buffers=self.gathered + buffers)

    def after_head(self, moment: Moment, left: Peak) -> Iterator[Peak]:
        """The head's gradient is only widened and accumulated."""
        if not self.adapters_only:
            yield from self._widened(moment, self.ends.head.trained, left)

    def in_embedding(self, moment: Moment, left: Peak, entering: float) -> Iterator[Peak]:
        passing = self.gathered + self.hold.compute * self.ends.embedding.trained
        yield left.plus("embedding", activations=entering, buffers=passing)
        yield from self._widened(moment, self.table, left)

    def at_end(self, batch: Peak) -> Iterator[Peak]:
        """At the end of the step, units are reduced one after another in network order."""
        if self.adapters_only:
            return
        hold, ends, stage = self.hold, self.ends, self.rank.stages[0]
        run, unit, cast = stage.runs[0], self.layout.unit, hold.reduce != hold.gradient
        others = hold.gradient * sum(
            one.blocks.trained_share + one.ends.trained_share for one in self.rank.stages[1:]
        )
        whole = total((stage.blocks, stage.ends))
        if stage.first:
            first, share = ends.embedding, ends.embedding.trained_share
        else:
            first, share = run.block.times(next_unit(stage, stage.layers - 1, unit).blocks), 0
        gathered = self.rank.gathered(whole) - self.rank.gathered(first)
        yield batch.plus(
            "reduce",
            grads=others + hold.reduce * whole.trained + hold.gradient * share,
            buffers=gathered + hold.reduce * (first.trained + share * cast),
        )
        if stage.last:
            head = ends.head
            travelled = head.trained + head.trained_share * cast
            if cast and self.layout.dp > 1:
                travelled += run.block.trained_share * next_unit(stage, 0, unit).blocks
            landed = hold.gradient * (stage.blocks.trained_share + head.trained_share)
            yield batch.plus(
                "reduce",
                grads=others + hold.reduce * head.trained + landed,
                buffers=hold.reduce * travelled,
            )
