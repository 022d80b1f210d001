"""Candidate memory peaks of a step: everything held at each moment besides parameters and optimizer states.

In time order: the end of a forward pass; the loss and the head; the final norm; the last blocks of every run of equal
ones, and the first block of all; the embedding; the end of the step. On a tie, the first one is reported as the peak.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.layout.offload import IN_FLIGHT, OffDevice
from shoal.facts.layout.offload_activations import HORIZON
from shoal.predict.memory.block_workload import BlockActivations, BlockPeak
from shoal.predict.memory.fetched import FetchedWeights
from shoal.predict.memory.gradients import RankGradients
from shoal.predict.memory.in_flight import GradientProgress, Moment, moments
from shoal.predict.memory.inventory import BlockRun, RankInventory
from shoal.predict.memory.peak import Peak
from shoal.predict.memory.update import passing
from shoal.predict.workload import Workload

# Tokens, positions and targets, int64, for every micro-batch of the step.
BATCH_BYTES = 3 * 8


def peaks(gradients: RankGradients) -> Iterator[Peak]:
    """All candidate peaks of one pipeline rank."""
    for kind in gradients.passes():
        yield from _peaks_of_passes(kind)


def _peaks_of_passes(gradients: RankGradients) -> Iterator[Peak]:
    workload, layout = gradients.rank.workload, gradients.layout
    fullest: dict[tuple[int, tuple[GradientProgress, ...], bool, int], tuple[float, Moment]] = {}
    for moment in moments(
        layout.schedule, layout.pp, layout.chunks, workload.accumulation, gradients.rank.number
    ):
        # What is added on top depends on these alone.
        kind = moment.stage, moment.begun, moment.split, moment.since_loss
        size = at_start(gradients, moment).total()
        if kind not in fullest or size > fullest[kind][0]:
            fullest[kind] = size, moment
    for _, moment in fullest.values():
        yield from BackwardPass(gradients, moment).peaks()
    batch = Peak(activations=_batch(workload))
    yield from gradients.at_end(batch)
    updating = max(passing(gradients.rank), FetchedWeights(gradients.rank).gathering())
    yield batch.plus("update", grads=gradients.complete, buffers=updating)


def _batch(workload: Workload) -> float:
    # Context ranks read whole rows and select their tokens from them.
    cp = workload.layout.cp
    shares = cp + 1 if cp > 1 else 1
    reference = 8 * workload.micro if workload.recipe.loss_facts.reference else 0
    return float((BATCH_BYTES * workload.tokens * shares + reference) * workload.accumulation)


def held_at_start(rank: RankInventory, moment: Moment, standing: float) -> Peak:
    """What a rank holds when a backward pass begins, without gradients."""
    micro, workload, layout = rank.micro_batch, rank.workload, rank.workload.layout
    activations, logits, buffers = _batch(workload), 0.0, standing
    for kept, held, deferred in zip(rank.in_flight, moment.held, moment.deferred, strict=True):
        activations += held * (kept.blocks - kept.away)
        activations += held * kept.others + deferred * kept.deferred
        logits += held * kept.logits
        buffers += held * (kept.casts + kept.head_cast + kept.messages)
    if layout.pp > 1:
        # Received for later computations; the gradient received for this one; and those sent. gloo cannot report that
        # a message has left, so it keeps all of them until the end of the step; NCCL frees them with the next message.
        sent = moment.sent if micro.work.cpu else moment.just_sent
        messages = moment.waiting + rank.hears_from_next(moment.stage) + sent
        passed = moment.passed
        if not micro.work.sp:
            # A stage whose weight gradients are deferred still needs the gradient it received, unless that was
            # all-gathered from the tensor ranks.
            given = sum(count for number, count in enumerate(moment.deferred) if rank.hears_from_next(number))
            messages, passed = messages + given, passed - given
        buffers += messages * micro.stream
        activations += passed * micro.stream
    return Peak("", 0.0, activations, logits, buffers)


def waiting_activations(rank: RankInventory) -> OffDevice:
    """Host and NVMe bytes of offloaded activations with the most micro-batches in flight; buffers are reused."""
    layout = rank.workload.layout
    passes = moments(layout.schedule, layout.pp, layout.chunks, rank.workload.accumulation, rank.number)
    size = max(
        sum(held * kept.away for held, kept in zip(moment.held, rank.in_flight, strict=True))
        for moment in passes
    )
    if not rank.on_nvme("activations"):
        return OffDevice(size, 0.0)
    # In transit to and from a file: what two blocks save.
    each = max(
        kept.away / max(1, len(rank.blocks_away(number))) for number, kept in enumerate(rank.in_flight)
    )
    return OffDevice(min(size, IN_FLIGHT * each), size)


def at_start(gradients: RankGradients, moment: Moment) -> Peak:
    """``held_at_start``, plus the head's gradient from another micro-batch's loss on a V's rank with both ends."""
    rank = gradients.rank
    start, logits = held_at_start(rank, moment, gradients.standing), rank.micro_batch.logits
    if rank.stages[moment.stage].last or gradients.alone or logits.later:
        return start
    # This rank also has the end of the network, with a micro-batch whose backward pass has not come yet.
    behind = any(stage.last and held for stage, held in zip(rank.stages, moment.held, strict=True))
    return start.plus("", buffers=logits.waiting) if behind else start


class BackwardPass:
    """One backward pass of a stage: what is held as it begins (``start``), and its candidate peaks."""

    def __init__(self, gradients: RankGradients, moment: Moment) -> None:
        self.gradients, self.moment, self.rank = gradients, moment, gradients.rank
        self.stage, self.kept = self.rank.stages[moment.stage], self.rank.in_flight[moment.stage]
        self.micro, self.work = self.rank.micro_batch, self.rank.micro_batch.work
        self.gathered_stream = self.micro.stream * (self.work.tp if self.work.sp else 1)
        self.away, self.fetched = self.rank.blocks_away(moment.stage), FetchedWeights(self.rank)
        self.start = at_start(gradients, moment)
        # The head's gradients of micro-batches whose backward pass has not come yet.
        others = self.stage.last and moment.held[moment.stage] > 1 and not self.micro.logits.later
        self.waiting = self.micro.logits.waiting if others else 0.0

    def peaks(self) -> Iterator[Peak]:
        if self.work.tp > 1 and not self.stage.last:
            yield self._end_of_forward()
        if in_block := self._kind(self.stage.runs[-1]).forward:
            yield self._forward(in_block)
        if self.stage.last:
            yield from self._head()
        # What remains of the start once the head is done.
        left = self.start.plus("", logits=-self.kept.logits, buffers=self.waiting - self.kept.head_cast)
        if self.gradients.alone:
            left = left.plus("", grads=-self.waiting)
        if self.stage.last:
            left = left.plus("", activations=-self.micro.norm)
            yield left.plus(
                "last norm",
                grads=self.gradients.held(self.moment, 0),
                activations=self.micro.norm_backward,
                buffers=self.gradients.in_norm(self.moment) + self.fetched.in_loss(self.moment.stage),
            )
        yield from self._blocks(left)
        if self.stage.first:
            yield from self._embedding(left)

    def _end_of_forward(self) -> Peak:
        """End of the forward pass before: the last projection's output on a tensor rank, and a copy to be reduced."""
        stream, sp = self.micro.stream, self.work.sp
        copies = 2 if self.work.rows > 1 or not sp else 1
        came = stream if self.rank.hears_from_next(self.moment.stage) else 0.0
        # The last two blocks' offloaded activations have not left yet.
        last = range(max(0, self.stage.layers - 2), self.stage.layers)
        leaving = sum(
            self._kind(self.rank.run_of(self.moment.stage, one)).resting for one in last if one in self.away
        )
        return self.start.plus(
            "forward",
            grads=self.gradients.held(self.moment, None),
            activations=copies * self.gathered_stream + (stream if sp else 0.0) + leaving,
            buffers=self.gradients.in_loss(self.moment) - came + self.fetched.in_forward(self.moment.stage),
        )

    def _forward(self, beyond: float) -> Peak:
        """The last block of the forward pass before, when the head has allocated nothing yet."""
        came = self.micro.stream if self.rank.hears_from_next(self.moment.stage) else 0.0
        return self.start.plus(
            "forward",
            grads=self.gradients.held(self.moment, None),
            activations=beyond - (self.micro.norm if self.stage.last else 0.0),
            logits=-self.kept.logits,
            buffers=self.gradients.in_loss(self.moment)
            - self.kept.head_cast
            - came
            + self.fetched.in_forward(self.moment.stage),
        )

    def _head(self) -> Iterator[Peak]:
        """The loss, with logits and everything derived from them; then the head's gradient as autograd hands it on."""
        gradients, moment, found = self.gradients, self.moment, self.micro.logits
        gathered, gathering = gradients.in_loss(moment), gradients.gathering_head
        start = self.start.plus(
            "loss", grads=gradients.held(moment, None), buffers=self.fetched.in_loss(moment.stage)
        )
        if not found.later:
            # The loss was computed before some of the receives started that the backward pass finds.
            start = start.plus("loss", buffers=-moment.since_loss * self.micro.stream)
        before = start.plus("loss", activations=self.micro.result, logits=-found.resting)
        if gathering:
            yield before.plus("head", buffers=gathering - found.cast)
        if self.rank.workload.stack.loss != "fused":
            yield before.plus("loss", logits=found.peak, buffers=gathered)
            return
        # Gradients of other micro-batches are waiting; this one's is added to them.
        loss = start.plus("loss", activations=self.micro.result, buffers=gathered + self.waiting)
        made, last = found.product + found.added, found.added or found.product
        if gradients.adapters_only:
            made = last = 0.0
        stays = gradients.stays(moment)  # this pass's product becomes the gradient itself
        if stays and last == found.waiting:
            loss, made = loss.plus("loss", grads=last), made - last
        behind = 0.0 if found.later else gradients.behind
        yield loss.plus("loss", logits=found.peak, buffers=found.copy + made + behind)
        if gradients.adapters_only:
            return
        if not self.waiting and last != found.waiting:
            yield loss.plus("head", buffers=last + found.waiting)
        head = start.plus("head", buffers=gathered + gradients.head_bucket)
        yield head.plus("head", grads=found.waiting * stays, buffers=found.waiting * (not stays))
        yield from gradients.after_head(moment, start)
        if self.work.sp and self.work.rows > 1:
            # Ranks receive their parts of all sequences one after another, so these are reordered.
            sorted_out = self.gathered_stream + self.micro.stream
            yield head.plus("head", activations=sorted_out, grads=found.waiting * stays)

    def _blocks(self, left: Peak) -> Iterator[Peak]:
        """The last blocks of every run of equal ones, and the first block of all."""
        done = 0  # blocks whose backward pass is over
        for run in reversed(self.stage.runs):
            cast = run.block.whole * self.rank.hold.compute if self.kept.casts else 0
            for count in self._looked_at(run, done):
                freed = self._freed(run, done, count)
                there = left.plus("", activations=-freed, buffers=-count * cast)
                yield from self._block(run, done + count, there)
            freed = self._freed(run, done, run.layers)
            left = left.plus("", activations=-freed, buffers=-run.layers * cast)
            done += run.layers

    def _block(self, run: BlockRun, done: int, left: Peak) -> Iterator[Peak]:
        """One block: before its first weight gradient; at it; at its largest activations; under zero=3, at its end."""
        gradients, moment, hold = self.gradients, self.moment, self.rank.hold
        block, stream = self._kind(run), self.micro.stream
        name = "first block" if done == self.stage.layers - 1 else "block" if done else "last block"
        back, ahead = self._back(run, done)
        weights = self.fetched.in_block(moment.stage, self.stage.layers - 1 - done)
        left = left.plus(name, activations=self._given(done) + back + ahead, buffers=weights)
        if self._is_sent_on(done):
            left = left.plus(name, activations=-stream, buffers=stream)
        buffers = run.block.whole * hold.compute if self.rank.casts_again else 0.0
        grads = gradients.held(moment, done, gradients.made(run, 1))
        passing = buffers + gradients.in_block(moment, run, done, 1)
        if self.stage.layers - 1 - done in self.away and not block.reads_input:
            # The end of the recomputed forward pass: its input, the sum with attention's output and, being sent to
            # other tensor ranks, the second norm's output are still alive, and there is no gradient yet.
            yield left.plus(
                name,
                grads=gradients.held(moment, done),
                activations=block.opening - block.inner + (3 if self.work.sp else 2) * stream,
                buffers=buffers + gradients.in_block(moment, run, done, 0),
            )
        entering = stream + (self.gathered_stream if self.work.sp else 0.0)
        yield from gradients.before_experts(moment, run, done, left.plus(name, activations=entering))
        early = [one for one in block.working if one.made == 0]
        later = [one for one in block.working if one.made != 0]
        yield from self._worked(run, done, left.plus(name, buffers=buffers), early)
        for size, gone in gradients.first_product(moment, run, done, block):
            yield left.plus(name, grads=grads, activations=block.opening - gone, buffers=passing + size)
        put_off = block.put_off if moment.split else 0.0
        if block.rounding and not moment.split:
            yield left.plus(
                name,
                grads=gradients.held(moment, done),
                activations=block.opening + block.rounding,
                buffers=buffers + gradients.in_block(moment, run, done, 0),
            )
        if moment.split and self.work.recompute == "selective" and not self.work.fp8:
            # The last product, which nothing reads again, is not saved when its weight gradient is deferred.
            put_off -= hold.compute * self.rank.workload.model.hidden * self.work.tokens
        yield from self._worked(run, done, left.plus(name, buffers=buffers), later, put_off)
        yield from gradients.after_experts(moment, run, done, block, left)
        end = left.plus(name, activations=stream - back - self._freed(run, done, 1))
        yield from gradients.after_block(moment, run, done, end)

    def _worked(
        self, run: BlockRun, done: int, left: Peak, moments: list[BlockPeak], put_off: float = 0.0
    ) -> Iterator[Peak]:
        gradients = self.gradients
        for size, count, exchange, waiting, added in moments:
            # By then some projections are done, unless their weight gradients are deferred.
            made = gradients.made(run, count)
            used = made * self.rank.hold.compute if self.rank.casts else 0
            yield left.plus(
                left.name,
                grads=gradients.held(self.moment, done, made),
                activations=size + put_off,
                buffers=exchange
                + gradients.added_up_by_part(run, waiting, added)
                - used
                + gradients.in_block(self.moment, run, done, count),
            )

    def _embedding(self, left: Peak) -> Iterator[Peak]:
        """The embedding's gradient: of the micro-batch, only the entering gradient is left."""
        freed, done = 0.0, 0
        for run in reversed(self.stage.runs):
            freed += self._freed(run, done, run.layers)
            done += run.layers
        others = self.kept.others - (self.micro.norm if self.stage.last else 0.0)
        left = left.plus(
            "embedding",
            grads=self.gradients.held(self.moment, self.stage.layers),
            activations=-freed - others,
            buffers=self.fetched.in_embedding(self.moment.stage) - self.kept.casts,
        )
        # The table is wider than the compute precision, so the looked-up rows were cast.
        hold = self.rank.hold
        wide = hold.wide / hold.compute if hold.cast else 1.0
        yield from self.gradients.in_embedding(self.moment, left, wide * self.gathered_stream)

    def _kind(self, run: BlockRun) -> BlockActivations:
        return self.micro.blocks[run.kind]

    def _looked_at(self, run: BlockRun, done: int) -> list[int]:
        """How many blocks of a run are done at each candidate peak.

        With offloaded activations, also next to both ends of the offloaded range; with offloaded weights, where most
        are fetched.
        """
        found, last = set(self.gradients.blocks_looked_at(run, done)), self.stage.layers - 1 - done
        for end in (self.away.start, self.away.stop) if self.away else ():
            found |= {last - end, last - end + HORIZON, last - end - HORIZON}
        found |= {last - one for one in self.fetched.looked_at(self.moment.stage)}
        return sorted(one for one in found if 0 <= one < run.layers)

    def _freed(self, run: BlockRun, done: int, count: int) -> float:
        """Saved bytes that these blocks' backward passes free. A split backward pass still needs some of them."""
        block, end = self._kind(run), self.stage.layers - done
        away = self.rank.away_among(self.moment.stage, end - count, end)
        return (count - away) * block.resting - (count * block.deferred if self.moment.split else 0.0)

    def _back(self, run: BlockRun, done: int) -> tuple[float, float]:
        """Offloaded activations that are back on the device: this block's, and prefetched ones of earlier blocks."""
        number, block, ahead = self.stage.layers - 1 - done, self._kind(run), 0.0
        back = block.resting if number in self.away else 0.0
        if back and not block.reads_input:
            back -= self.micro.stream  # freed when the forward pass is recomputed
        for earlier in range(number - HORIZON, number):
            if earlier in self.away:
                ahead += self._kind(self.rank.run_of(self.moment.stage, earlier)).resting
        return back, ahead

    def _given(self, done: int) -> float:
        """Correction for a stage's received gradient: the first block counts it itself, and a message is a buffer."""
        if self.stage.last:
            return 0.0
        begun = done > 0
        # With deferred weight gradients, the first block keeps counting it.
        twice = begun and self.moment.split and not self.work.sp
        return self.micro.stream * (begun - twice - self.rank.hears_from_next(self.moment.stage))

    def _is_sent_on(self, done: int) -> bool:
        """Whether the gradient that a stage will send is already in its send buffer: residual gradients accumulate in
        place.

        From the first sum on, if the gradient was received, and only if nothing else holds it.
        """
        if self.rank.workload.layout.pp == 1 or not self.rank.hears_from_previous(self.moment.stage):
            return False
        held = self.moment.split and not self.work.sp
        return not held and (self.stage.last or done > 0)
