"""The moments of a step that can be the fullest, with all that is held then beside weights and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shoal.predict.activations import Block
from shoal.predict.gradients import Gradients
from shoal.predict.inflight import Begun, Moment, bottom, moments
from shoal.predict.offload import Waiting
from shoal.predict.places import Chunk, Place, Run
from shoal.predict.setting import Setting

# Tokens, positions and targets, int64, of every micro-batch of the step.
BATCH_BYTES = 3 * 8


class Instant(NamedTuple):
    """Bytes held at one moment."""

    name: str
    grads: float
    activations: float
    logits: float
    buffers: float
    host: float = 0.0
    nvme: float = 0.0

    def total(self) -> float:
        return self.grads + self.activations + self.logits + self.buffers


class Kept(NamedTuple):
    """What a micro-batch in flight holds of one chunk."""

    blocks: float
    others: float  # tables of rotary positions; the final norm and its result
    logits: float
    casts: float  # the blocks' weights in the compute precision, where autograd keeps them
    head_cast: float  # and the head's
    messages: float  # to and from other stages
    deferred: float  # once only weight gradients are left to compute


class Scene(NamedTuple):
    """A rank of the pipeline, with everything that its moments are made of."""

    setting: Setting
    place: Place
    rank: int
    gradients: Gradients
    kept: list[Kept]
    away: Waiting
    bottom: bool  # whether both ends of the V are here: one stage passes to the next without a message


def instants(
    setting: Setting, place: Place, rank: int, gradients: Gradients, away: Waiting
) -> Iterator[Instant]:
    """All candidates of one rank of the pipeline."""
    question, layout = setting.question, setting.question.layout
    below = bottom(layout.schedule, layout.pp, rank)
    kept = [
        _kept(setting, chunk, below and number == 0, below and number == 1)
        for number, chunk in enumerate(place.chunks)
    ]
    scene = Scene(setting, place, rank, gradients, kept, away, below)
    fullest: dict[tuple[int, tuple[Begun, ...], bool], tuple[Instant, Moment]] = {}
    for moment in moments(layout.schedule, layout.pp, layout.chunks, question.accumulation, rank):
        # What comes on top depends on these three alone.
        kind = moment.chunk, moment.begun, moment.split
        base = _base(scene, moment)
        if kind not in fullest or base.total() > fullest[kind][0].total():
            fullest[kind] = base, moment
    for base, moment in fullest.values():
        chunk = place.chunks[moment.chunk]
        if layout.tp > 1 and not chunk.last:
            yield _leaving(scene, moment, chunk, base)
        if chunk.last:
            yield from _in_the_head(scene, moment, chunk, base)
            yield _in_the_norm(scene, moment, chunk, base)
        yield from _in_the_blocks(scene, moment, chunk, base)
        if chunk.first:
            yield from _in_the_embedding(scene, moment, chunk, base)
    batch = BATCH_BYTES * question.tokens * question.accumulation
    left = {
        "nothing": 0.0,
        "a micro-batch": kept[-1].blocks + kept[-1].others,
        "a block": setting.common.norm_backward + setting.common.stream,
    }
    for grads, buffers, there in gradients.at_the_end():
        yield Instant("reduce", grads, batch + left[there], 0.0, buffers)
    yield Instant("update", gradients.complete, batch, 0.0, 0.0)


def _kept(setting: Setting, chunk: Chunk, upper: bool, lower: bool) -> Kept:
    """``upper`` and ``lower``: the chunks around the bottom of a V, between which nothing is sent."""
    common, compute = setting.common, setting.hold.compute
    blocks = deferred = 0.0
    for run in chunk.runs:
        one = common.blocks[run.experts, run.window]
        blocks += run.layers * one.resting
        deferred += run.layers * one.deferred
    layout = setting.question.layout
    others = common.tables + (common.norm if chunk.last else 0.0)
    messages = 0.0
    if layout.pp > 1:
        first = chunk.runs[0]
        if not chunk.first and common.blocks[first.experts, first.window].held_input:
            blocks -= common.stream  # it counts as what it came as
        messages = common.stream * ((not chunk.first) + (not chunk.last))
        if upper:
            others, messages = others + common.stream, messages - common.stream
        if lower:
            messages -= common.stream  # what it was given is the other chunk's
    casts = 0.0
    if setting.keeps_casts:
        casts = compute * (chunk.blocks.whole + (setting.question.model.hidden if chunk.last else 0))
    if not chunk.last:
        return Kept(blocks, others, 0.0, casts, 0.0, messages, deferred)
    return Kept(blocks, others, common.loss.resting, casts, common.loss.cast, messages, deferred)


def _base(scene: Scene, moment: Moment) -> Instant:
    """What is there when a backward pass begins, but for gradients."""
    question = scene.setting.question
    activations = float(BATCH_BYTES * question.tokens * question.accumulation)
    resting = logits = buffers = 0.0
    for kept, micro_batches, deferred in zip(scene.kept, moment.held, moment.deferred, strict=True):
        resting += micro_batches * kept.blocks
        activations += micro_batches * kept.others + deferred * kept.deferred
        logits += micro_batches * kept.logits
        buffers += micro_batches * (kept.casts + kept.head_cast + kept.messages)
    buffers += scene.gradients.standing
    if question.layout.pp > 1:
        buffers += _messages(scene, moment)
        activations += moment.passed * scene.setting.common.stream
        # The gradient that a chunk was given is among what it still needs where weights' gradients are put off; unless
        # that was gathered from the tensor ranks.
        given = (
            0
            if scene.setting.work.sp
            else sum(
                deferred
                for number, (chunk, deferred) in enumerate(
                    zip(scene.place.chunks, moment.deferred, strict=True)
                )
                if not chunk.last and not (scene.bottom and number == 0)
            )
        )
        activations -= given * scene.setting.common.stream
        buffers += given * scene.setting.common.stream
    if scene.away.share_of_params and scene.gradients.way in ("alone", "whole", "chunks"):
        # Weights that rest elsewhere come in block by block, one ahead.
        block = max(run.part.whole for run in scene.place.chunks[moment.chunk].runs)
        buffers += 2 * scene.setting.hold.compute * block * scene.away.share_of_params
    offloaded = scene.away.share_of_activations * resting
    if offloaded:
        # One block's tensors are used while another's are on their way.
        last = scene.place.chunks[moment.chunk].runs[-1]
        buffers += 2 * scene.setting.common.blocks[last.experts, last.window].resting
    host, nvme = (0.0, offloaded) if scene.away.activations_on_nvme else (offloaded, 0.0)
    return Instant("", 0.0, activations + resting - offloaded, logits, buffers, host, nvme)


def _messages(scene: Scene, moment: Moment) -> float:
    """What is received for later computations; the gradient that came for this one; those that were sent.

    gloo, which cannot be asked whether a message has gone, keeps all of them to the end of the step; NCCL's go with the
    next message.
    """
    sent = moment.sent if scene.setting.work.cpu else moment.just_sent
    return (moment.waiting + _came(scene, moment) + sent) * scene.setting.common.stream


def _in_the_head(scene: Scene, moment: Moment, chunk: Chunk, base: Instant) -> Iterator[Instant]:
    """The loss, with logits and what is made of them; then the head's backward pass, with its weight's gradient."""
    common, kept, gradients = scene.setting.common, scene.kept[moment.chunk], scene.gradients
    found, layout = common.loss, scene.setting.question.layout
    grads, logits = gradients.there(moment, chunk, None), base.logits - found.resting
    gathered = base.buffers + gradients.in_the_loss(moment, chunk)
    if found.forward:
        # The tokens of this rank, beside those that were gathered of them.
        own = common.stream if layout.sp else 0.0
        there = gathered + found.weight - found.adding + gradients.behind(chunk)
        yield Instant(
            "loss", grads, base.activations + own, logits + found.forward, there, base.host, base.nvme
        )
    if gathering := gradients.gathering(chunk):
        there = base.buffers - kept.head_cast + gathering
        yield Instant("head", grads, base.activations, logits, there, base.host, base.nvme)
    activations, logits, buffers = base.activations, logits + found.hidden, gathered + found.weight
    # What a first backward pass makes stays as the gradient itself.
    first = gradients.first(moment)
    stays = found.adding if first else 0.0
    grads, buffers = grads + stays, buffers - stays
    yield Instant("loss", grads, activations, logits + found.peak, buffers, base.host, base.nvme)
    if gradients.adapters:
        return
    alone = first and not found.adding
    made = buffers + found.product
    if alone and not found.added:
        grads, made = grads + found.product, buffers
    yield Instant("head", grads, activations, logits + found.given, made, base.host, base.nvme)
    # The logits' gradients have gone, and with them the weight as it was multiplied and what it was multiplied with.
    bucket = gradients.in_the_head()
    made += (
        max(found.added, bucket - found.product) if found.adding else found.added + bucket
    ) - kept.head_cast
    if alone:
        grads, made = grads + found.added, made - found.added
    entering = found.entering
    left = activations - found.hidden - entering
    yield Instant("head", grads, left, logits + entering, made, base.host, base.nvme)
    for stays, passing in gradients.after_the_head(moment, chunk):
        held, late = gradients.there(moment, chunk, None) + stays, base.buffers - kept.head_cast + passing
        yield Instant("head", held, left, logits + entering, late, base.host, base.nvme)
    if scene.setting.work.sp and scene.setting.work.rows > 1:
        # Ranks are sent their parts of all sequences one after the other: they are put in order.
        made -= 0.0 if first else found.product
        left += found.hidden + found.entering + common.stream
        yield Instant("head", grads, left, logits + entering, made, base.host, base.nvme)


def _leaving(scene: Scene, moment: Moment, chunk: Chunk, base: Instant) -> Instant:
    """The end of the forward pass before: what the last projection leaves on a tensor rank, and a copy to be summed."""
    setting = scene.setting
    layout, common = setting.question.layout, setting.common
    whole = common.stream * (layout.tp if layout.sp else 1)
    copied = setting.work.rows > 1 or not layout.sp
    came = common.stream if _came(scene, moment) else 0.0
    return Instant(
        "forward",
        scene.gradients.there(moment, chunk, None),
        base.activations + whole * (1 + copied) + (common.stream if layout.sp else 0.0),
        base.logits,
        base.buffers - came + scene.gradients.in_the_loss(moment, chunk),
        base.host,
        base.nvme,
    )


def _came(scene: Scene, moment: Moment) -> bool:
    """Whether the gradient that a backward pass begins with was received."""
    return not scene.place.chunks[moment.chunk].last and not (scene.bottom and moment.chunk == 0)


def _in_the_norm(scene: Scene, moment: Moment, chunk: Chunk, base: Instant) -> Instant:
    """The backward pass of the norm before the head, when the logits are gone."""
    kept, common = scene.kept[moment.chunk], scene.setting.common
    return Instant(
        "last norm",
        scene.gradients.there(moment, chunk, 0),
        base.activations - common.norm + common.norm_backward,
        base.logits - kept.logits,
        base.buffers - kept.head_cast + scene.gradients.in_the_norm(moment, chunk),
        base.host,
        base.nvme,
    )


def _in_the_blocks(scene: Scene, moment: Moment, chunk: Chunk, base: Instant) -> Iterator[Instant]:
    """The last blocks of every run of equal ones, and the first blocks of all."""
    setting, kept = scene.setting, scene.kept[moment.chunk]
    common, compute = setting.common, setting.hold.compute
    in_units = scene.gradients.way == "units"
    base = base._replace(
        activations=base.activations - (common.norm if chunk.last else 0.0),
        logits=base.logits - kept.logits,
        buffers=base.buffers - kept.head_cast,
    )
    after = 0  # blocks whose backward pass is done
    for run in reversed(chunk.runs):
        one, last = common.blocks[run.experts, run.window], run.layers - 1
        freed = _let_go(scene, moment, one)
        cast = run.part.whole * compute if kept.casts else 0
        # Beside the blocks next to the ends more is gathered and sent than beside those at the ends; where several
        # blocks are a unit, its first block is its end.
        ends = (chunk.layers - 1 - after) % setting.question.layout.unit
        places = {0, min(1, last), max(0, last - 1), min(ends, last)} if in_units else {0, last}
        if in_units and (setting.question.layout.unit > 1 or scene.gradients.casts_sums):
            places |= {min(2, last), last}
        for done in sorted(places):
            before = base._replace(
                activations=base.activations - done * freed, buffers=base.buffers - done * cast
            )
            yield from _in_a_block(scene, moment, chunk, run, after + done, before)
        base = base._replace(
            activations=base.activations - run.layers * freed, buffers=base.buffers - run.layers * cast
        )
        after += run.layers


def _in_the_embedding(scene: Scene, moment: Moment, chunk: Chunk, base: Instant) -> Iterator[Instant]:
    """The end of the first chunk's backward pass: nothing of its micro-batch is left but the gradient that enters."""
    kept, common, setting = scene.kept[moment.chunk], scene.setting.common, scene.setting
    freed = sum(
        run.layers * _let_go(scene, moment, common.blocks[run.experts, run.window]) for run in chunk.runs
    )
    layout = setting.question.layout
    wide = common.stream * setting.hold.wide / setting.hold.compute * (layout.tp if layout.sp else 1)
    there = scene.gradients.there(moment, chunk, chunk.layers)
    for grads, made, over in scene.gradients.in_the_embedding(moment):
        yield Instant(
            "embedding",
            there + grads,
            base.activations - freed - kept.others + (0.0 if over else wide),
            base.logits - kept.logits,
            base.buffers - kept.casts - kept.head_cast + made,
            base.host,
            base.nvme,
        )


def _let_go(scene: Scene, moment: Moment, one: Block) -> float:
    """What a block's backward pass frees on the device. If it is split, some is still needed."""
    on_device = 1 - scene.away.share_of_activations
    return one.resting * on_device - (one.deferred if moment.split else 0.0)


def _entering(scene: Scene, moment: Moment, chunk: Chunk, blocks: int) -> float:
    """The gradient that a chunk was given stays there all the while; the block that it enters counts it as its own."""
    if chunk.last:
        return 0.0
    stream = scene.setting.common.stream
    # Where weights' gradients are put off, the first block goes on counting it as well.
    twice = stream if moment.split and blocks and not scene.setting.work.sp else 0.0
    if scene.bottom and moment.chunk == 0:
        return (stream if blocks else 0.0) - twice
    return (0.0 if blocks else -stream) - twice


def _is_sent_on(scene: Scene, moment: Moment, chunk: Chunk, blocks: int) -> bool:
    """Gradients of the residual stream are added up in place, so what a chunk will send is there from early on.

    From the first sum on, if the gradient was received; not where something else holds it as well.
    """
    sends = (
        scene.setting.question.layout.pp > 1 and not chunk.first and not (scene.bottom and moment.chunk == 1)
    )
    held = moment.split and not scene.setting.work.sp
    return sends and not held and (chunk.last or blocks > 0)


def _in_a_block(
    scene: Scene, moment: Moment, chunk: Chunk, run: Run, blocks: int, base: Instant
) -> Iterator[Instant]:
    """Moments of one block's backward pass: its first product; its fullest activations; under zero=3, its end."""
    setting, gradients = scene.setting, scene.gradients
    one, compute = setting.common.blocks[run.experts, run.window], setting.hold.compute
    name = "first block" if blocks == chunk.layers - 1 else "last block" if blocks == 0 else "block"
    buffers = base.buffers + one.exchange
    if setting.casts_again:
        buffers += run.part.whole * compute
    still = one.put_off if moment.split else 0.0
    if moment.split and setting.work.recompute == "selective":
        # The last product, which nobody uses again, is not kept where its weight's gradient is put off.
        still -= compute * setting.question.model.hidden * setting.work.tokens
    base = base._replace(activations=base.activations + _entering(scene, moment, chunk, blocks))
    if _is_sent_on(scene, moment, chunk, blocks):
        stream = setting.common.stream
        base = base._replace(activations=base.activations - stream, buffers=base.buffers + stream)
        buffers += stream
    # In the order of time: of two that are as full, the first one is the peak.
    grads = gradients.there(moment, chunk, blocks, gradients.made(run, 1))
    made = buffers + gradients.in_a_block(moment, chunk, run, blocks, 1)
    for size, gone in gradients.adding(moment, run, one.inner, one.put_off - one.inner):
        opening = base.activations + one.opening - gone
        yield Instant(name, grads, opening, base.logits, made + size, base.host, base.nvme)
    for size, count in one.working:
        # By then some projections are done, unless their weights' gradients are put off.
        done = gradients.made(run, count)
        used = done * compute if setting.casts_again or setting.keeps_casts else 0
        grads = gradients.there(moment, chunk, blocks, done)
        there = buffers - used + gradients.in_a_block(moment, chunk, run, blocks, count)
        # What was kept elsewhere is not there to go.
        activations = base.activations + (max(0.0, size) if scene.away.share_of_activations else size) + still
        yield Instant(name, grads, activations, base.logits, there, base.host, base.nvme)
    if gradients.way == "units" and (chunk.layers - 1 - blocks) % setting.question.layout.unit == 0:
        left = base.activations - _let_go(scene, moment, one) + setting.common.stream
        for grads, late in gradients.after_a_unit(moment, chunk, run, blocks):
            yield Instant(name, grads, left, base.logits, base.buffers + late, base.host, base.nvme)
