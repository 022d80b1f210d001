"""Weights in use and gradients on their way, as a backward pass goes on: what each way of sharding keeps of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.facts.groups import even_share
from shoal.facts.holdings import Holdings
from shoal.facts.schedule import SPLIT_BACKWARD
from shoal.predict.inflight import Begun, Moment
from shoal.predict.places import Chunk, Place, Run
from shoal.predict.question import Question
from shoal.predict.setting import Setting
from shoal.predict.weights import Part

# One data rank: gradients appear as they are computed. Replicas, and zero=1 (zero=2 too in a pipeline): whole gradients
# are there from the start. zero=2: a rank's own chunks are, and a few buckets pass by. zero=3: shards appear; units
# of weights are gathered, and their gradients pass by whole; in a pipeline both stay whole to the end of the step.
Way = Literal["alone", "whole", "chunks", "units", "piped units"]


class Gradients(NamedTuple):
    """Of one rank of the pipeline."""

    question: Question
    place: Place
    hold: Holdings
    way: Way
    adapters: bool  # these alone are trained
    frees: bool  # units are freed between their forward and their backward pass
    whole: int  # trained parameters
    share: int  # those that this rank updates
    down: int  # the projection out of a block's MLP, whose gradient comes first
    expert_down: int

    @property
    def standing(self) -> float:
        """With zero=2 in a pipeline: whole gradients add up to the end of the step beside this rank's share."""
        layout = self.question.layout
        waits = self.way == "whole" and layout.zero == 2 and layout.fsdp * layout.cp > 1
        return self.hold.gradient * self.whole if waits else 0.0

    @property
    def complete(self) -> float:
        """At the update."""
        layout = self.question.layout
        shards = layout.zero >= 2 and layout.fsdp * layout.cp > 1
        return self.hold.gradient * (self.share if shards else self.whole) * self.stay

    @property
    def stay(self) -> float:
        """Where the host updates, shards of gradients follow the optimizer's states there as they are summed."""
        if self.way not in ("units", "chunks"):
            return 1.0
        gone = (part.fraction for part in self.question.layout.offload if part.what == "optimizer")
        return 1.0 - next(gone, 0.0)

    def in_other_streams(self, grads: float) -> float:
        """What FSDP allocates in streams of its own, beyond ``grads`` that are there at the fullest moment.

        torch's allocator keeps a pool for each stream: what the computation frees, gradients cannot be put into.
        """
        if self.way != "units" or self.adapters:
            return 0.0
        ahead = self.hold.compute * self.question.tune.prefetch
        unit = self._unit(self.place.chunks[0].runs[-1])
        return max(0.0, self.complete - grads) + (self.hold.reduce + ahead) * unit

    def there(self, moment: Moment, chunk: Chunk, blocks: int | None, made: int = 0) -> float:
        """Gradients held in the loss (``blocks`` is None), or after the backward pass of so many blocks of a chunk.

        ``made``: those of the next block's weights that have been computed.
        """
        if self.way == "whole" and not self.standing:
            return self.hold.gradient * self.whole
        if self.way in ("whole", "chunks"):
            return self.hold.gradient * self.share * self.stay
        width = self.hold.reduce if self.way == "piped units" else self.hold.gradient
        shares = self.way == "units"
        # An earlier backward pass has left the gradients of a chunk; where it was split, at first of its ends alone.
        arrived: float = sum(
            (self._of(other.blocks, shares) if begun is Begun.ALL else 0) + self._of(other.ends, shares)
            for other, begun in zip(self.place.chunks, moment.begun, strict=True)
            if begun
        )
        here = moment.begun[moment.chunk]
        if here is not Begun.ALL and not moment.split and blocks is not None:
            whole = blocks - (self._done_of_unit(chunk, blocks) if shares else 0)
            arrived += self._of(chunk.blocks, shares) * whole // chunk.layers
            if self.way in ("alone", "piped units") and not self.adapters:
                arrived += made
        if not here and blocks is not None and chunk.last and not self.adapters:
            # A matrix that the embedding shares is one unit with it, which is done at the very end.
            tied = shares and self.question.model.tied
            arrived += self._of(self.place.ends.norm, shares)
            arrived += 0 if tied else self._of(self.place.ends.head, shares)
        return width * self.stay * arrived

    def in_the_loss(self, moment: Moment, chunk: Chunk) -> float:
        """Gathered weights: the last blocks' and the head's; prefetching asks for more at the first backward hook."""
        if self.way == "piped units" or (self.way == "units" and not self.frees):
            return self.hold.compute * self.place.total.whole
        if self.way != "units":
            return self._still_flying(moment)
        ahead = max(1, self.question.tune.prefetch)
        last = chunk.runs[-1]
        gathered = self._unit_at(last, 0, chunk) + self._unit(last) * (ahead - 1)
        return self.hold.compute * (self._root() + gathered)

    def gathering(self, chunk: Chunk) -> float:
        """As a forward pass comes to a head of its own: the unit before it and the head, both also in one piece."""
        if self.way != "units" or not self.frees or self.question.model.tied:
            return 0.0
        unit = self._unit_at(chunk.runs[-1], 0, chunk)
        return 2 * self.hold.compute * (unit + self.place.ends.head.dense)

    def behind(self, chunk: Chunk) -> float:
        """In a forward pass FSDP keeps what it gathered last in one piece as well, until it gathers again."""
        if self.way != "units" or not self.frees:
            return 0.0
        last = self._unit(chunk.runs[-1]) if self.question.model.tied else self.place.ends.head.dense
        return self.hold.compute * last

    def in_the_head(self) -> float:
        """With zero=2 the bucket that the head's gradient is put into."""
        if self.way != "chunks":
            return 0.0
        limit = max(self.question.tune.bucket_mb * 2**20 / self.hold.gradient, self.place.ends.head.dense)
        bucket = self.hold.reduce * min(limit, self.whole - self.place.ends.embedding.dense)
        # Where the product is cast it has gone by then.
        return max(0.0, bucket - self.hold.compute * self.place.ends.head.dense) if self.hold.cast else bucket

    def in_the_norm(self, moment: Moment, chunk: Chunk) -> float:
        """After the head, before the last block: the head's gradient is on its way."""
        last = chunk.runs[-1]
        if self.way != "units" or self.adapters:
            return self.in_a_block(moment, chunk, last, 0, 0)
        return self._gathered(last, 0, chunk) + self.hold.reduce * self.place.ends.head.dense

    def in_the_embedding(self, moment: Moment) -> tuple[float, float]:
        """The last gradient of all, as it is computed: what stays of it, and what is on its way."""
        hold, ends = self.hold, self.place.ends
        table = 0 if self.adapters else ends.embedding.dense
        product = hold.gradient * table
        if self.way == "units":
            # Its unit's copy on the way, and this rank's share of the sum.
            return 0.0, (hold.compute + hold.reduce) * table + hold.reduce * ends.embedding.share
        if self.way == "piped units":
            widened = hold.reduce * table if hold.reduce != hold.compute else 0.0
            return 0.0, hold.compute * (self.place.total.whole + table) + widened
        if self.way == "chunks":
            return 0.0, product + hold.reduce * table + self._buckets()
        if self.way == "whole" and hold.reduce != hold.gradient:
            return 0.0, product + hold.reduce * (self.whole - table)
        if self.first(moment) and not self.question.model.tied:
            return product, 0.0
        return 0.0, product

    def first(self, moment: Moment) -> bool:
        """Whether what is computed stays as the gradient itself: nothing is there yet that it would be added to."""
        return self.way == "alone" and not moment.begun[moment.chunk]

    def _still_flying(self, moment: Moment) -> float:
        """With zero=2 the last bucket of a backward pass, the embedding's, lands when the next one is sent."""
        if self.way != "chunks" or self.adapters or not moment.begun[moment.chunk]:
            return 0.0
        return self.hold.reduce * self.place.ends.embedding.dense

    def _buckets(self) -> float:
        """With zero=2, one that fills and one that is sent. A token embedding has a bucket of its own."""
        limit = self.question.tune.bucket_mb * 2**20 / self.hold.gradient
        others = self.whole if self.adapters else self.whole - self.place.ends.embedding.dense
        return self.hold.reduce * min(2 * max(limit, self.down, self.expert_down), others)

    def in_a_block(self, moment: Moment, chunk: Chunk, run: Run, blocks: int, made: int) -> float:
        """Besides: the gradients of the unit after this one, on their way; with zero=2 a bucket that fills, too.

        ``made``: how many of the MLP's gradients are there already.
        """
        hold = self.hold
        if self.way == "alone":
            return 0.0
        if self.way == "whole":
            if hold.reduce == hold.gradient:
                return 0.0
            # In another precision a bucket travels as a copy, and all copies wait for the end of the step.
            return hold.reduce * self._of(chunk.blocks, False) * blocks / chunk.layers
        if self.way == "chunks":
            # As long as the first bucket fills, the last one of the pass before may still be on its way.
            filling = self.question.tune.bucket_mb * 2**20 >= hold.gradient * self._of(chunk.blocks, False)
            return self._buckets() + (self._still_flying(moment) if filling else 0.0)
        if self.way == "piped units":
            return hold.compute * self.place.total.whole
        gathered = self._gathered(run, blocks, chunk)
        if self.adapters:
            return gathered
        # Of this unit's gradients those of its later blocks; the unit before is on its way.
        done = self._done_of_unit(chunk, blocks)
        first, ends = blocks == done, self.place.ends
        before = ends.head.dense + ends.norm.dense if first else self._unit_at(run, blocks - done - 1, chunk)
        return gathered + hold.compute * (done * run.part.whole + self.made(run, made)) + hold.reduce * before

    def _done_of_unit(self, chunk: Chunk, blocks: int) -> int:
        """After the backward pass of so many blocks: how many of them are in the same unit as the next one."""
        unit, place = self.question.layout.unit, max(0, chunk.layers - 1 - blocks)
        return min(chunk.layers - 1, place // unit * unit + unit - 1) - place

    def after_a_unit(self, chunk: Chunk, run: Run, blocks: int) -> float:
        """Its gradients, whole, and their copy on the way; the next unit is gathered, and what is asked for ahead."""
        unit = 0 if self.adapters else self._unit_at(run, blocks, chunk)
        passing = (self.hold.compute + self.hold.reduce) * unit
        return passing + self._gathered(run, blocks + 1, chunk)

    def adding(self, moment: Moment, run: Run, inner: float) -> float:
        """The first weight gradient of a block: as the product gives it; then, its input gone, as it is added up."""
        if self.adapters or moment.split:
            return 0.0
        hold, made, piped = self.hold, self.made(run, 1), self.way == "piped units"
        width = hold.reduce if piped else hold.gradient
        again = (
            width * made
            if moment.begun[moment.chunk] is Begun.ALL or self.way not in ("alone", "piped units")
            else 0.0
        )
        if hold.compute == hold.reduce if piped else not hold.cast:
            return again
        if piped and self.question.layout.schedule in SPLIT_BACKWARD:
            inner = 0.0  # such a product widens its gradient itself, before its input goes
        return max(hold.compute * made, hold.compute * made + again - inner)

    def made(self, run: Run, count: int) -> int:
        """Of a block's weights whose gradients come first: the MLP's, from its way out."""
        return count * (self.expert_down if run.experts else self.down)

    def _gathered(self, run: Run, blocks: int, chunk: Chunk) -> float:
        """This unit, and those asked for ahead, as far as there are any; and a matrix that embedding and head share."""
        if not self.frees:
            return self.hold.compute * self.place.total.whole
        left = max(0, chunk.layers - blocks - 1) // self.question.layout.unit
        ahead = min(left, self.question.tune.prefetch) * self._unit(run)
        root = self._root() if self.question.model.tied else 0
        return self.hold.compute * (root + self._unit_at(run, blocks, chunk) + ahead)

    def _root(self) -> int:
        """What stays from the forward pass to the backward pass: the head, or the matrix that it shares."""
        ends = self.place.ends
        return ends.embedding.dense if self.question.model.tied else ends.head.dense

    def _unit(self, run: Run) -> int:
        return run.part.whole * min(self.question.layout.unit, run.layers)

    def _unit_at(self, run: Run, blocks: int, chunk: Chunk) -> int:
        """The unit of the block before the last ``blocks``. What does not fill a unit is the last one."""
        unit, place = self.question.layout.unit, max(0, chunk.layers - 1 - blocks)
        return run.part.whole * min(unit, chunk.layers - place // unit * unit)

    def _of(self, part: Part, shares: bool) -> int:
        return trained(part, self.adapters, shares)


def gradients_of(setting: Setting, place: Place) -> Gradients:
    question, layout, model = setting.question, setting.question.layout, setting.question.model
    way: Way = "alone"
    if setting.sharded:
        way = "units" if layout.pp == 1 else "piped units"
    elif layout.fsdp * layout.cp > 1:
        way = "chunks" if layout.zero == 2 and layout.pp == 1 else "whole"
    elif layout.dp > 1:
        way = "whole"
    adapters = question.lora is not None
    experts = model.experts
    return Gradients(
        question,
        place,
        setting.hold,
        way,
        adapters,
        layout.zero == 3 and question.tune.persist_below <= layout.unit * place.chunks[0].runs[0].part.whole,
        trained(place.total, adapters, False),
        trained(place.total, adapters, True),
        even_share(model.ffn, layout.tp) * model.hidden,
        experts.count // layout.ep * even_share(experts.ffn, layout.tp) * model.hidden if experts else 0,
    )


def trained(part: Part, adapters: bool, shares: bool) -> int:
    """Parameters that have gradients: all of them or a rank's rows."""
    if adapters:
        return part.adapter_share if shares else part.adapter
    return part.share + part.expert_share if shares else part.dense + part.expert
