"""Gradients as a backward pass goes on, and what is in buffers beside them. Here: of one data rank.

What data ranks do about them is a subclass of ``RankGradients``, found by the strategy's name: ``replicate``, ``zero``
(zero=1 and 2), ``shard`` (zero=3). A subclass says how many gradients are held (``held``, ``complete``) and what is
gathered, cast or on its way at each moment. Moments are told apart by how many blocks are ``done``: those of the stage
whose backward pass is over; None: it has not begun.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.groups import even_share
from shoal.predict.memory.activations import BlockActivations
from shoal.predict.memory.in_flight import Begun, Moment
from shoal.predict.memory.inventory import BlockRun, RankInventory, RankStage
from shoal.predict.memory.peak import Peak


class RankGradients:
    """Gradients appear as they are computed."""

    def __init__(self, rank: RankInventory) -> None:
        question = rank.question
        self.rank, self.hold, self.total, self.ends = rank, rank.hold, rank.total, rank.ends
        self.model, self.layout, self.tune = question.model, question.layout, question.tune
        self.adapters_only = question.lora is not None
        # Bytes of a gradient as it adds up, and as autograd hands it on.
        self.width, self.handed_on = self.hold.gradient, self.hold.gradient

    def passes(self) -> Iterator[RankGradients]:
        """Kinds of backward passes that leave different gradients."""
        yield self

    # Gradients.

    @property
    def complete(self) -> float:
        """At the update."""
        return self.hold.gradient * self.total.trained

    def held(self, moment: Moment, done: int | None, made: int = 0) -> float:
        """``made``: of the next block, parameters whose gradients have been computed."""
        stage, before = self.stage(moment), moment.before
        # An earlier backward pass has left the gradients of a stage; where it was split, at first of its ends alone.
        arrived = sum(
            (other.blocks.trained if begun is Begun.ALL else 0) + other.ends.trained
            for other, begun in zip(self.rank.stages, moment.begun, strict=True)
            if begun
        )
        if done is None:
            return self.width * arrived
        if before is not Begun.ALL and not moment.split:
            arrived += stage.blocks.trained * done // stage.layers + (0 if self.adapters_only else made)
        if not before and stage.last:
            arrived += self.ends.norm.trained + self.ends.head.trained
        return self.width * arrived

    def stays(self, moment: Moment) -> bool:
        """Whether what is computed is the gradient itself: nothing is there yet that it would be added to."""
        return not moment.before

    def made(self, run: BlockRun, count: int | None) -> int:
        """Of a block's weights whose gradients come first: the MLP's, from its way out; None: of all of them."""
        if count is None:
            return run.block.whole
        return count * self.down_projection(run.experts)

    def down_projection(self, experts: bool) -> int:
        """Its gradient comes first."""
        width, routed = self.model.ffn, self.model.experts
        count = 1
        if experts and routed:
            width, count = routed.ffn, routed.count // self.layout.ep
        return count * even_share(width, self.layout.tp) * self.model.hidden

    def in_other_streams(self, grads: float) -> float:
        """What is allocated in streams of its own, beyond ``grads`` that are there at the fullest moment."""
        return 0.0

    # Buffers.

    @property
    def standing(self) -> float:
        """From the first backward pass of a step to its end."""
        return 0.0

    def gathering_head(self) -> float:
        """As a forward pass comes to the head."""
        return 0.0

    def behind(self) -> float:
        """What a forward pass still holds of what it gathered, in the loss."""
        return 0.0

    def in_loss(self, moment: Moment) -> float:
        return 0.0

    def head_bucket(self) -> float:
        """What the head's gradient is put into."""
        return 0.0

    def in_norm(self, moment: Moment) -> float:
        """After the head, before the last block."""
        return self.in_block(moment, self.stage(moment).runs[-1], 0, 0)

    def in_block(self, moment: Moment, run: BlockRun, done: int, made: int | None) -> float:
        """``made``: how many of the MLP's gradients are there already; None: all of the block's."""
        return self.tied_head(moment)

    def tied_head(self, moment: Moment) -> float:
        """A matrix that head and embedding share: the head's gradient waits, for autograd hands on the sum of both."""
        if not self.model.tied or self.layout.pp > 1 or self.stays(moment):
            return 0.0
        return self.handed_on * self.ends.head.trained

    # Moments.

    def first_product(
        self, moment: Moment, run: BlockRun, block: BlockActivations
    ) -> Iterator[tuple[float, float]]:
        """The first weight gradient of a block: as the product gives it; then, its inputs gone, as it is added up.

        Bytes in buffers, and those of the activations that have gone by then.
        """
        if self.adapters_only or moment.split:
            yield 0.0, 0.0
            return
        matrix = self.made(run, 1)
        added = 0.0 if self.stays_in_block(moment) else self.width * matrix
        if self.hold.cast:
            yield self.hold.compute * matrix, 0.0
            # By then the weight as it was multiplied has gone as well, as wide as the product.
            yield added, block.put_off
        else:
            yield added, 0.0

    def stays_in_block(self, moment: Moment) -> bool:
        """As ``stays``: of the blocks' weights, whose gradients may come later than those of the ends."""
        return moment.before is not Begun.ALL

    def blocks_looked_at(self, run: BlockRun, done: int) -> list[int]:
        """How many blocks of a run are done when one can be the fullest: none, or all but one."""
        return sorted({0, run.layers - 1})

    def after_head(self, moment: Moment, left: Peak) -> Iterator[Peak]:
        """As the head's gradient is reduced, itself still there."""
        yield from ()

    def after_block(self, moment: Moment, run: BlockRun, done: int, left: Peak) -> Iterator[Peak]:
        yield from ()

    def in_embedding(self, moment: Moment, left: Peak, entering: float) -> Iterator[Peak]:
        """The last gradient of all, from the one that enters; then that the pass is over."""
        product, third = self.hold.gradient * self.table, self.third_tensor
        if self.stays(moment) and not self.model.tied:
            yield left.plus("embedding", grads=product, activations=entering)
            return
        passing = self.copies(self.total.trained - self.ends.embedding.trained) + product
        passing += self.tied_head(moment)
        yield left.plus("embedding", activations=entering, buffers=passing)
        if third:
            yield left.plus("embedding", buffers=passing + third)

    def copies(self, count: float) -> float:
        """Gradients that travel as copies."""
        return 0.0

    def at_end(self, batch: Peak) -> Iterator[Peak]:
        """As the last gradients of a step are reduced."""
        yield from ()

    # What the moments have in common.

    def stage(self, moment: Moment) -> RankStage:
        return self.rank.stages[moment.stage]

    @property
    def table(self) -> int:
        """The embedding's matrix. The gradient of learned positions, which lie beside it, comes by itself."""
        matrix = even_share(self.model.vocab, self.layout.tp) * self.model.hidden
        return min(self.ends.embedding.trained, matrix)

    @property
    def head_is_view(self) -> bool:
        """Whether the gradient of a head that is the embedding is a view, as a single product gives it."""
        whole = self.model.tied and self.layout.pp == 1 and not self.adapters_only
        return whole and not self.rank.micro_batch.logits.adding

    @property
    def third_tensor(self) -> float:
        """Two gradients are added up in a third tensor where the head's is a view."""
        return self.hold.gradient * self.table if self.head_is_view and not self.hold.cast else 0.0
