"""Weights in use and gradients on their way, as a backward pass goes on: what each way of sharding keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
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
# What the last reduction of a step finds of its activations.
Left = Literal["nothing", "a block", "a micro-batch"]


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
    in_pieces: bool  # whether the loss is computed a few tokens at a time, the head's gradient added up
    partial: bool = False  # replicas of shards: a pass between the first and the last, where they sum nothing

    def passes(self) -> Iterator[Gradients]:
        """Kinds of backward passes that leave different gradients: replicas of shards cast their sums in the last one.

        Until then these add up as they travel.
        """
        if self.casts_sums and self.question.accumulation > 2:
            yield self._replace(partial=True)
        yield self

    @property
    def casts_sums(self) -> bool:
        """Whether replicas of shards sum gradients in another precision than they are kept in."""
        replicas = self.way == "units" and self.question.layout.dp > 1 and not self.adapters
        return replicas and self.hold.reduce != self.hold.gradient

    @property
    def standing(self) -> float:
        """With zero=2 in a pipeline: whole gradients add up to the end of the step beside this rank's share."""
        layout = self.question.layout
        waits = self.way == "whole" and layout.zero == 2 and layout.shards > 1
        return self.hold.gradient * self.whole if waits else 0.0

    @property
    def complete(self) -> float:
        """At the update."""
        layout = self.question.layout
        shards = layout.zero >= 2 and layout.shards > 1
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
        if self.casts_sums and any(moment.begun):
            done = 0.0
            if not self.partial:
                first = moment._replace(begun=(Begun.NOTHING,) * len(moment.begun))
                done = self.there(first, chunk, blocks, made)
            return done + self.hold.reduce * (self.share * self.stay - done / self.hold.gradient)
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
        if self.way != "chunks" or self.question.model.tied:
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
        passing = 0.0 if self.question.model.tied else self.hold.reduce * self.place.ends.head.dense
        passing += self._waiting(moment, chunk)
        return self._gathered(last, 0, chunk) + passing + self._landing(chunk, last, 0)

    def after_the_head(self, moment: Moment, chunk: Chunk) -> Iterator[tuple[float, float]]:
        """As the head is reduced, its gradient still there: what stays, and what is gathered and on its way.

        In a pipeline it is only widened, to be added up.
        """
        hold, head = self.hold, self.place.ends.head
        if self.adapters:
            return
        if self.way == "piped units" and hold.compute != hold.reduce:
            stays, passing = self._widened(moment, head.dense)
            yield stays, passing + hold.compute * self.place.total.whole
        if self.way == "units" and not self.question.model.tied:
            stays, going = self._summed(moment, head.share)
            gathered = self.in_the_loss(moment, chunk) - (hold.compute * head.dense if self.frees else 0.0)
            yield stays, gathered + (hold.compute + hold.reduce) * head.dense + going

    def _widened(self, moment: Moment, matrix: int) -> tuple[float, float]:
        """A gradient and its copy in the precision that it adds up in, where the first stays as the gradient itself."""
        product, widened = self.hold.compute * matrix, self.hold.reduce * matrix
        return (0.0, product + widened) if moment.begun[moment.chunk] else (widened, product)

    def _waiting(self, moment: Moment, chunk: Chunk) -> float:
        """A matrix that head and embedding share: the head's gradient waits, for autograd hands on the sum of both."""
        together = self.question.model.tied and chunk.first and chunk.last
        if (
            not together or self.adapters or self.first(moment)
        ):  # the first one counts as the gradient already
            return 0.0
        width = self.hold.compute if self.way == "units" else self.hold.gradient
        return width * self.place.ends.head.dense

    def in_the_embedding(self, moment: Moment) -> Iterator[tuple[float, float, bool]]:
        """The last gradient of all: what stays of it, what is on its way, whether the pass itself is over by then."""
        hold, ends, chunk = self.hold, self.place.ends, self.place.chunks[moment.chunk]
        table = 0 if self.adapters else ends.embedding.dense
        run = chunk.runs[0]
        model = self.question.model
        # The gradient of learned positions, which lie beside the table, comes by itself.
        matrix = min(table, even_share(model.vocab, self.question.layout.tp) * model.hidden)
        product, waiting = hold.gradient * matrix, self._waiting(moment, chunk)
        together = model.tied and chunk.last
        # Two gradients are added up in a third tensor where the head's is a view, as a single product gives it.
        viewed = together and not self.in_pieces and not self.adapters
        third = product if viewed and not hold.cast else 0.0
        if self.way == "units":
            kept = self._gathered(run, chunk.layers, chunk)
            before = 0 if self.adapters else hold.reduce * self._unit_at(run, chunk.layers - 1, chunk)
            passing = kept + before + hold.compute * table + waiting + self._landing(chunk, run, chunk.layers)
            yield 0.0, passing, False
            if viewed:
                yield 0.0, passing + hold.compute * matrix, True
            stays, passing = self._summed(moment, 0 if self.adapters else ends.embedding.share)
            # What is reduced is no longer gathered; a sum goes as it is copied.
            passing += (0.0 if self.frees else kept) + hold.reduce * table
            passing += 0.0 if together else hold.compute * table
            yield stays, passing + self._landing(chunk, run, chunk.layers, 1), True
        elif self.way == "piped units":
            gathered = hold.compute * self.place.total.whole
            yield 0.0, gathered + hold.compute * table, False
            if hold.compute != hold.reduce:
                stays, passing = self._widened(moment, matrix)
                yield stays, gathered + passing, True
        elif self.way == "chunks":
            if together:
                yield 0.0, waiting + product + third, True
            yield 0.0, product + hold.reduce * table + self._buckets(1), together
        elif self.way == "whole" and hold.reduce != hold.gradient and self.question.layout.pp == 1:
            copies = hold.reduce * (self.whole - table)
            yield 0.0, copies + waiting + product, False
            if third:
                yield 0.0, copies + waiting + product + third, True
        elif self.first(moment) and not model.tied:
            yield product, 0.0, False
        else:
            yield 0.0, waiting + product, False
            if third:
                yield 0.0, waiting + product + third, True

    def _summed(self, moment: Moment, share: int) -> tuple[float, float]:
        """A unit's sum as it lands, beside the gradients before it: what is one by then, and what goes at once."""
        hold = self.hold
        cast = hold.reduce != hold.gradient
        kept, travelled = hold.gradient * share * self.stay, hold.reduce * share
        if self.partial:
            return 0.0, travelled
        if any(moment.begun) and self.question.layout.dp == 1:
            return 0.0, travelled + (kept if cast else 0.0)
        return kept, travelled if cast else 0.0

    def at_the_end(self) -> Iterator[tuple[float, float, Left]]:
        """Gradients and buffers as the last of a step are reduced, and which activations are left then.

        In another precision a bucket travels as a copy, and all copies wait for the end of the step. In a pipeline
        units are reduced one after the other, in the order of the network.
        """
        hold, ends, chunk = self.hold, self.place.ends, self.place.chunks[0]
        if self.way == "whole" and hold.reduce != hold.gradient:
            copies, table = hold.reduce * self.whole, 0
            if chunk.first and not self.adapters:
                table = ends.embedding.dense
            yield self.complete, copies, "nothing"
            if not self.standing:
                product = hold.gradient * table
                yield self.complete, copies - hold.reduce * table + product, "a block"
            elif self.place.chunks[-1].last and not self.adapters:
                # A bucket goes as soon as it is copied. The first one is the head's.
                yield self.complete, self.standing + hold.reduce * ends.head.dense, "a micro-batch"
        if self.way != "piped units" or self.adapters:
            return
        others, run = self.place.chunks[1:], chunk.runs[0]
        whole = self._of(chunk.blocks, False) + self._of(chunk.ends, False)
        done = hold.gradient * sum(self._of(one.blocks, True) + self._of(one.ends, True) for one in others)
        cast = hold.reduce != hold.gradient
        if chunk.first:
            table, share = ends.embedding.dense, ends.embedding.share
        else:
            table, share = self._unit_at(run, chunk.layers - 1, chunk), 0
        gathered = hold.compute * (whole - table)
        landed = hold.gradient * share
        travelled = hold.reduce * (table + (share if cast else 0))
        yield done + hold.reduce * whole + landed, gathered + travelled, "nothing"
        if chunk.last:
            head, share = ends.head.dense, ends.head.share
            landed = hold.gradient * (self._of(chunk.blocks, True) + share)
            travelled = hold.reduce * (head + (share if cast else 0))
            if cast and self.question.layout.dp > 1:
                travelled += hold.reduce * self._share_at(run, 0, chunk)
            yield done + hold.reduce * head + landed, travelled, "nothing"

    def first(self, moment: Moment) -> bool:
        """Whether what is computed stays as the gradient itself: nothing is there yet that it would be added to."""
        return self.way == "alone" and not moment.begun[moment.chunk]

    def _still_flying(self, moment: Moment) -> float:
        """With zero=2 the last bucket of a backward pass, the embedding's, lands when the next one is sent."""
        if self.way != "chunks" or self.adapters or not moment.begun[moment.chunk]:
            return 0.0
        return self.hold.reduce * self.place.ends.embedding.dense

    def _buckets(self, count: int = 2) -> float:
        """With zero=2, one that fills and one that is sent. A token embedding has a bucket of its own."""
        limit = self.question.tune.bucket_mb * 2**20 / self.hold.gradient
        others = self.whole if self.adapters else self.whole - self.place.ends.embedding.dense
        return self.hold.reduce * min(count * max(limit, self.down, self.expert_down), others)

    def in_a_block(self, moment: Moment, chunk: Chunk, run: Run, blocks: int, made: int | None) -> float:
        """Besides: the gradients of the unit after this one, on their way; with zero=2 a bucket that fills, too.

        ``made``: how many of the MLP's gradients are there already; None: all of the block's.
        """
        hold, waiting = self.hold, self._waiting(moment, chunk)
        if self.way == "alone":
            return waiting
        if self.way == "whole":
            # In another precision a bucket travels as a copy, and all copies wait for the end of the step.
            if hold.reduce == hold.gradient or self.question.layout.pp > 1:
                return waiting
            head = 0 if self.adapters or self.question.model.tied else self.place.ends.head.dense
            return waiting + hold.reduce * (head + self._of(chunk.blocks, False) * blocks / chunk.layers)
        if self.way == "chunks":
            # As long as the first bucket fills, the last one of the pass before may still be on its way.
            head = 0 if self.adapters or self.question.model.tied else self.place.ends.head.dense
            put_in = head + self._of(chunk.blocks, False) * blocks / chunk.layers + self.made(run, made)
            if self.question.tune.bucket_mb * 2**20 >= hold.gradient * put_in:
                return waiting + self._buckets(1) + self._still_flying(moment)
            return waiting + self._buckets()
        if self.way == "piped units":
            return hold.compute * self.place.total.whole
        gathered = self._gathered(run, blocks, chunk)
        if self.adapters:
            return gathered
        # Of this unit's gradients those of its later blocks; the unit before is on its way.
        done = self._done_of_unit(chunk, blocks)
        first, ends = blocks == done, self.place.ends
        if not first:
            before = self._unit_at(run, blocks - done - 1, chunk)
        else:
            before = 0 if self.question.model.tied else ends.head.dense + ends.norm.dense
        own = hold.compute * (done * run.part.whole + self.made(run, made))
        return gathered + own + waiting + hold.reduce * before + self._landing(chunk, run, blocks)

    def _done_of_unit(self, chunk: Chunk, blocks: int) -> int:
        """After the backward pass of so many blocks: how many of them are in the same unit as the next one."""
        if blocks == chunk.layers:
            return 0
        unit, place = self.question.layout.unit, max(0, chunk.layers - 1 - blocks)
        return min(chunk.layers - 1, place // unit * unit + unit - 1) - place

    def after_a_unit(
        self, moment: Moment, chunk: Chunk, run: Run, blocks: int
    ) -> Iterator[tuple[float, float]]:
        """Gradients and buffers as a unit is reduced and the next one, which was gathered before, is taken apart."""
        hold, there, last = self.hold, self.there(moment, chunk, blocks), blocks + 1 == chunk.layers
        following = 0.0 if last else hold.compute * self._unit_at(run, blocks + 1, chunk)
        kept = self._gathered(run, chunk.layers, chunk)
        if not self.frees:
            following = 0.0
        if self.adapters:
            yield there, kept + 2 * following
            return
        unit, share = self._unit_at(run, blocks, chunk), self._share_at(run, blocks, chunk)
        passing = kept + following + hold.reduce * unit + self._waiting(moment, chunk)
        # The unit's gradients, whole, and their copy on the way; then beside that copy this rank's share of the sum.
        yield there, passing + hold.compute * unit + self._landing(chunk, run, blocks)
        stays, going = self._summed(moment, share)
        yield there + stays, passing + going + self._landing(chunk, run, blocks, 1)
        there = self.there(moment, chunk, blocks + 1)
        yield there, passing + following + self._landing(chunk, run, blocks + 1)

    def _landing(self, chunk: Chunk, run: Run, blocks: int, count: int = 2) -> float:
        """The replicas' sums of the two units before this one, which stay in the precision that they travelled in."""
        if not self.casts_sums or self.partial:
            return 0.0
        sums: list[int] = []
        done = blocks - self._done_of_unit(chunk, blocks)
        while done and len(sums) < count:
            sums.append(self._share_at(run, done - 1, chunk))
            done -= self._blocks_at(done - 1, chunk)
        if chunk.last and not self.question.model.tied:
            sums.append(self._of(self.place.ends.head, True))
        return self.hold.reduce * sum(sums[:count])

    def adding(
        self, moment: Moment, run: Run, inner: float, gathered: float
    ) -> Iterator[tuple[float, float]]:
        """The first weight gradient of a block: as the product gives it; then, its inputs gone, as it is added up.

        Its bytes, and those of the activations that have gone by then.
        """
        if self.adapters or moment.split or self.way == "units":
            yield 0.0, 0.0
            return
        hold, made, piped = self.hold, self.made(run, 1), self.way == "piped units"
        width = hold.reduce if piped else hold.gradient
        again = (
            width * made
            if moment.begun[moment.chunk] is Begun.ALL or self.way not in ("alone", "piped units")
            else 0.0
        )
        product = hold.compute * made
        if hold.compute == hold.reduce if piped else not hold.cast:
            yield again, 0.0
            return
        yield product, 0.0
        if not piped:
            # By then the weight as it was multiplied has gone as well, as wide as the product.
            yield again, inner + gathered
        elif again:
            # A split product widens its gradient itself, before its input goes.
            yield product + again, 0.0 if self.question.layout.schedule in SPLIT_BACKWARD else inner

    def made(self, run: Run, count: int | None) -> int:
        """Of a block's weights whose gradients come first: the MLP's, from its way out; None: of all of them."""
        if count is None:
            return run.part.whole
        return count * (self.expert_down if run.experts else self.down)

    def _gathered(self, run: Run, blocks: int, chunk: Chunk) -> float:
        """This unit, and those asked for ahead, as far as there are any; and a matrix that embedding and head share."""
        if not self.frees:
            return self.hold.compute * self.place.total.whole
        root = self._root() if self.question.model.tied else 0
        if blocks == chunk.layers:
            return self.hold.compute * root
        left = (chunk.layers - blocks - 1) // self.question.layout.unit
        ahead = min(left, self.question.tune.prefetch) * self._unit(run)
        return self.hold.compute * (root + self._unit_at(run, blocks, chunk) + ahead)

    def _root(self) -> int:
        """What stays from the forward pass to the backward pass: the head, or the matrix that it shares."""
        ends = self.place.ends
        return ends.embedding.dense if self.question.model.tied else ends.head.dense

    def _unit(self, run: Run) -> int:
        return run.part.whole * min(self.question.layout.unit, run.layers)

    def _unit_at(self, run: Run, blocks: int, chunk: Chunk) -> int:
        """The unit of the block before the last ``blocks``."""
        return run.part.whole * self._blocks_at(blocks, chunk)

    def _share_at(self, run: Run, blocks: int, chunk: Chunk) -> int:
        return self._of(run.part, True) * self._blocks_at(blocks, chunk)

    def _blocks_at(self, blocks: int, chunk: Chunk) -> int:
        """How many blocks that unit has. What does not fill a unit is the last one."""
        unit, place = self.question.layout.unit, max(0, chunk.layers - 1 - blocks)
        return min(unit, chunk.layers - place // unit * unit)

    def _of(self, part: Part, shares: bool) -> int:
        return trained(part, self.adapters, shares)


def gradients_of(setting: Setting, place: Place) -> Gradients:
    question, layout, model = setting.question, setting.question.layout, setting.question.model
    way: Way = "alone"
    if setting.sharded:
        way = "units" if layout.pp == 1 else "piped units"
    elif layout.shards > 1:
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
        setting.common.loss.adding > 0,
    )


def trained(part: Part, adapters: bool, shares: bool) -> int:
    """Parameters that have gradients: all of them or a rank's rows."""
    if adapters:
        return part.adapter_share if shares else part.adapter
    return part.share + part.expert_share if shares else part.dense + part.expert
