"""Weights in use and gradients on their way, as a backward pass goes on: what each way of sharding keeps of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.facts.groups import even_share
from shoal.facts.holdings import Holdings
from shoal.predict.inflight import Moment
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

    def there(self, moment: Moment, chunk: Chunk, blocks: int | None, run: Run | None = None) -> float:
        """Gradients held in the loss (``blocks`` is None), or after the backward pass of so many blocks of a chunk."""
        if self.way == "whole":
            layout = self.question.layout
            shards = self.share if layout.zero == 2 and layout.fsdp * layout.cp > 1 else 0
            return self.hold.gradient * (self.whole + shards)
        if self.way == "chunks":
            return self.hold.gradient * self.share * self.stay
        width = self.hold.reduce if self.way == "piped units" else self.hold.gradient
        shares = self.way == "units"
        total = self.share if shares else self.whole
        width *= self.stay
        if moment.begun:
            return width * total
        arrived = 0.0
        if blocks is not None:
            arrived = self._of(chunk.blocks, shares) * blocks / chunk.layers
            if chunk.last and not self.adapters:
                arrived += self._of(self.place.ends.norm, shares) + self._of(self.place.ends.head, shares)
            if run is not None and self.way == "alone" and not self.adapters and not moment.split:
                arrived += self.first_made(run)
        return width * (total - self._of(chunk.blocks, shares) - self._of(chunk.ends, shares) + arrived)

    def in_the_loss(self, chunk: Chunk) -> float:
        """Gathered weights: the last blocks' and the head's; prefetching asks for more at the first backward hook."""
        if self.way == "piped units" or (self.way == "units" and not self.frees):
            return self.hold.compute * self.place.total.whole
        if self.way != "units":
            return 0.0
        ahead = max(1, self.question.tune.prefetch)
        last = chunk.runs[-1]
        gathered = self._unit_at(last, 0, chunk) + self._unit(last) * (ahead - 1)
        return self.hold.compute * (self._root() + gathered)

    def in_a_block(self, chunk: Chunk, run: Run, blocks: int) -> float:
        """Besides: the gradients of the unit after this one, on their way; with zero=2 a bucket that fills, too."""
        hold, question = self.hold, self.question
        if self.way == "alone":
            return 0.0
        if self.way == "whole":
            if hold.reduce == hold.gradient:
                return 0.0
            # In another precision a bucket travels as a copy, and all copies wait for the end of the step.
            return hold.reduce * self._of(chunk.blocks, False) * blocks / chunk.layers
        if self.way == "chunks":
            limit = max(question.tune.bucket_mb * 2**20 / hold.gradient, self.first_made(run))
            # A token embedding has a bucket of its own.
            others = self.whole if self.adapters else self.whole - self.place.ends.embedding.dense
            return hold.reduce * min(2 * limit, others)
        if self.way == "piped units":
            return hold.compute * self.place.total.whole
        gathered = self._gathered(run, blocks, chunk)
        if self.adapters:
            return gathered
        ends = self.place.ends
        before = self._unit_at(run, blocks - 1, chunk) if blocks else ends.head.dense + ends.norm.dense
        return gathered + hold.compute * self.first_made(run) + hold.reduce * before

    def after_a_unit(self, chunk: Chunk, run: Run, blocks: int) -> float:
        """Its gradients, whole, and their copy on the way; the next unit is gathered, and what is asked for ahead."""
        unit = 0 if self.adapters else self._unit_at(run, blocks, chunk)
        passing = (self.hold.compute + self.hold.reduce) * unit
        return passing + self._gathered(run, blocks + 1, chunk)

    def adding(self, moment: Moment, run: Run, inner: float) -> float:
        """The first weight gradient of a block: as the product gives it; then, its input gone, as it is added up."""
        if self.adapters or moment.split:
            return 0.0
        hold, made = self.hold, self.first_made(run)
        again = hold.gradient * made if moment.begun or self.way != "alone" else 0.0
        if not hold.cast:
            return again
        return max(hold.compute * made, hold.compute * made + again - inner)

    def first_made(self, run: Run) -> int:
        return self.expert_down if run.experts else self.down

    def _gathered(self, run: Run, blocks: int, chunk: Chunk) -> float:
        """This unit, and those asked for ahead, as far as there are any; the head's, until the last blocks are done."""
        if not self.frees:
            return self.hold.compute * self.place.total.whole
        left = max(0, chunk.layers - blocks - 1) // self.question.layout.unit
        ahead = min(left, self.question.tune.prefetch) * self._unit(run)
        root = self._root() if blocks == 0 or self.question.model.tied else 0
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
