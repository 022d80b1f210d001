"""Gradient memory over a backward pass, and the buffers that go with it. This base class covers a single data rank.

Each strategy for several data ranks is a subclass of ``RankGradients``, in the file of its name: ``replicate``,
``zero`` (zero=1 and 2), ``shard`` (zero=3). A subclass says how many gradients are held (``held``, ``complete``) and
what is gathered, cast or in flight at each moment. ``done`` is the number of blocks of the stage whose backward pass
is over; None: it has not begun.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.layout.buckets import even_share
from shoal.predict.memory.block_workload import BlockActivations
from shoal.predict.memory.in_flight import GradientProgress, Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory, RankStage
from shoal.predict.memory.peak import Peak
from shoal.predict.memory.states import updated_gradients


class RankGradients:
    """Gradients of one data rank, allocated as they are computed."""

    alone = True  # the first pass's product becomes the gradient itself
    piecemeal = True  # a block's gradients appear one by one

    def __init__(self, rank: RankInventory) -> None:
        workload, hold = rank.workload, rank.hold
        self.rank, self.hold, self.total, self.ends = rank, hold, rank.total, rank.ends
        self.model, self.layout, self.tune = workload.model, workload.layout, workload.tune
        self.adapters_only = workload.lora is not None
        # Bytes of a gradient in its accumulator, and as autograd hands it on; whether it is cast in between.
        self.width, self.handed_on, self.widens = hold.gradient, hold.gradient, hold.gradient != hold.compute
        # The share that stays on the device: with a host update, reduced gradients follow the optimizer states.
        self.stay = 1.0
        model, routed, tp = self.model, self.model.experts, self.layout.tp
        # down_proj's elements in a block without and with experts: its gradient comes first.
        count, width = (routed.count // self.layout.ep, routed.ffn) if routed else (0, 0)
        self.down = even_share(model.ffn, tp) * model.hidden, count * even_share(width, tp) * model.hidden
        # The embedding's matrix. Learned positions next to it get their gradient separately.
        self.table = min(self.ends.embedding.trained, even_share(model.vocab, tp) * model.hidden)
        # Buffers: held from a step's first backward pass to its end; when the forward pass reaches the head; still
        # held from all-gathers during the loss; and the bucket that the head's gradient goes into.
        self.standing = self.gathering_head = self.behind = self.head_bucket = 0.0

    def passes(self) -> Iterator[RankGradients]:
        """The kinds of backward passes that leave different gradients."""
        yield self

    # Gradients.

    @property
    def complete(self) -> float:
        """Bytes of gradients at the update."""
        return updated_gradients(self.rank) * self.stay

    def held(self, moment: Moment, done: int | None, made: int = 0) -> float:
        """Bytes of gradients held. ``made``: parameters of the next block whose gradients exist already."""
        stage, before = self.stage(moment), moment.before
        # Gradients from earlier backward passes of each stage; after a split pass, first only those of its ends.
        arrived = sum(
            (other.blocks.trained if begun is GradientProgress.ALL else 0) + other.ends.trained
            for other, begun in zip(self.rank.stages, moment.begun, strict=True)
            if begun
        )
        if done is None:
            return self.width * arrived
        if before is not GradientProgress.ALL and not moment.split:
            arrived += stage.last_blocks(done).trained + (0 if self.adapters_only else made)
        if not before and stage.last:
            arrived += self.ends.norm.trained + self.ends.head.trained
        return self.width * arrived

    def stays(self, moment: Moment) -> bool:
        """Whether there is no earlier gradient to add to."""
        return self.alone and not moment.before

    def made(self, run: BlockRun, count: float | None) -> int:
        """Elements of a block's first ``count`` weight gradients: the MLP's, down_proj's first; None: all."""
        whole = run.block.whole if count is None else round(count * self.down[run.experts])
        return min(whole, run.block.trained) if run.frozen else whole

    def added_up_by_part(self, run: BlockRun, waiting: int, added: int) -> float:
        """Bytes of the experts' gradients of one part of the tokens, waiting to be added to the other part's, and of
        the other part's products as they are added.
        """
        products = self.hold.compute * self.made(run, added) if added else 0.0
        return self._of_other_part(run, waiting) + products

    def _of_other_part(self, run: BlockRun, count: int) -> float:
        waiting = self.width if self.rank.lone_experts else self.handed_on
        return waiting * self.made(run, count) if count else 0.0

    def in_other_streams(self, grads: float) -> float:
        """Memory in the pools of other streams, beyond the ``grads`` held at the peak."""
        return 0.0

    # Buffers.

    def in_loss(self, moment: Moment) -> float:
        return 0.0

    def in_norm(self, moment: Moment) -> float:
        """After the head, before the last block."""
        return self.in_block(moment, self.stage(moment).runs[-1], 0, 0)

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: float | None) -> float:
        """``made``: how many of the MLP's gradients exist; None: all of the block's."""
        return self.tied_head(moment)

    def tied_head(self, moment: Moment) -> float:
        """A tied matrix: the head's gradient waits, because autograd hands on the sum of both."""
        if not self.model.tied or self.layout.pp > 1 or self.stays(moment):
            return 0.0
        return self.handed_on * self.ends.head.trained

    # Candidate peaks.

    def first_product(
        self, moment: Moment, run: BlockRun, done: int, block: BlockActivations
    ) -> Iterator[tuple[float, float]]:
        """A block's first weight gradient: at its product; at its accumulation, after its inputs are freed; and the
        second gradient's accumulation.

        Yields bytes in buffers, and bytes of activations freed by then.
        """
        if self.adapters_only or moment.split:
            yield 0.0, 0.0
            return
        matrix, first = self.made(run, 1), self.piecemeal and moment.before is not GradientProgress.ALL
        alone = run.experts and self.rank.lone_experts > 0 and not moment.before
        product, widened = self.hold.compute * matrix, self.width * matrix
        added = 0.0 if first or alone else widened
        if self.widens:
            # A first gradient of experts that no other rank has is held from when it is widened.
            yield product - alone * widened * self.stay, 0.0
            yield self.added_up(product, added, block)
            added = widened if alone else added
            if added and (count := block.added_ways_in):
                into, _ = self.added_up(count * product, count * added, block)
                into += self._of_other_part(run, max(one.added for one in block.working))
                yield into, block.opening - block.adding_way_in
        else:
            yield added, 0.0

    def added_up(self, product: float, added: float, block: BlockActivations) -> tuple[float, float]:
        """If the weight was cast, that cast, as wide as the product, has been freed by then."""
        return added + (0.0 if self.hold.cast else product), block.released or block.put_off

    def blocks_looked_at(self, run: BlockRun, done: int) -> list[int]:
        """How many blocks of a run are done at each candidate peak: none, or all but one."""
        return sorted({0, run.layers - 1})

    def after_head(self, moment: Moment, left: Peak) -> Iterator[Peak]:
        """While the head's gradient is reduced and still held itself."""
        yield from ()

    def before_experts(self, moment: Moment, run: BlockRun, done: int, left: Peak) -> Iterator[Peak]:
        yield from ()

    def after_experts(
        self, moment: Moment, run: BlockRun, done: int, block: BlockActivations, left: Peak
    ) -> Iterator[Peak]:
        yield from ()

    def after_block(self, moment: Moment, run: BlockRun, done: int, left: Peak) -> Iterator[Peak]:
        yield from ()

    def in_embedding(self, moment: Moment, left: Peak, entering: float) -> Iterator[Peak]:
        """The last gradient of the pass, computed from the entering one, which stays until it is widened; then the end
        of the pass.
        """
        product, widened = self.of_table
        computed = left.plus("embedding", activations=entering)
        if self.stays(moment) and not self.model.tied:
            if widened:
                yield computed.plus("embedding", grads=widened, buffers=product)
            else:
                yield computed.plus("embedding", grads=product)
            return
        summed = self.total.trained - self.rank.lone_experts - self.ends.embedding.trained
        passing = self.copies(summed) + product + widened
        yield computed.plus("embedding", buffers=passing + self.tied_head(moment))

    @property
    def of_table(self) -> tuple[float, float]:
        """The embedding's gradient as computed, and its widened accumulator, or 0 if that is not wider."""
        if self.widens and not self.hold.cast:
            return self.hold.compute * self.table, self.width * self.table
        return self.width * self.table, 0.0

    def copies(self, count: float) -> float:
        """Bytes of gradients that are sent as copies."""
        return 0.0

    def at_end(self, batch: Peak) -> Iterator[Peak]:
        """While a step's last gradients are reduced."""
        yield from ()

    def stage(self, moment: Moment) -> RankStage:
        return self.rank.stages[moment.stage]
