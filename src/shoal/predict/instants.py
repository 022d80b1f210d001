"""The moments of a step that can be the fullest, with all that is held then beside weights and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shoal.facts.layout import V_SHAPED
from shoal.predict.activations import Block
from shoal.predict.gradients import Gradients
from shoal.predict.inflight import Moment, moments
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


def instants(
    setting: Setting, place: Place, rank: int, gradients: Gradients, away: Waiting
) -> Iterator[Instant]:
    """All candidates of one rank of the pipeline."""
    question, layout = setting.question, setting.question.layout
    scene = Scene(setting, place, rank, gradients, [_kept(setting, chunk) for chunk in place.chunks], away)
    fullest: dict[tuple[int, bool, bool], tuple[Instant, Moment]] = {}
    for moment in moments(layout.schedule, layout.pp, layout.chunks, question.accumulation, rank):
        # What comes on top depends on these three alone.
        kind = moment.chunk, moment.begun, moment.split
        base = _base(scene, moment)
        if kind not in fullest or base.total() > fullest[kind][0].total():
            fullest[kind] = base, moment
    for base, moment in fullest.values():
        chunk = place.chunks[moment.chunk]
        if chunk.last:
            yield _in_the_loss(scene, moment, chunk, base)
        yield from _in_the_blocks(scene, moment, chunk, base)
    batch = BATCH_BYTES * question.tokens * question.accumulation
    yield Instant("update", gradients.complete, batch, 0.0, 0.0)


def _kept(setting: Setting, chunk: Chunk) -> Kept:
    common, compute = setting.common, setting.hold.compute
    blocks = deferred = 0.0
    for run in chunk.runs:
        one = common.blocks[run.experts, run.window]
        blocks += run.layers * one.resting
        deferred += run.layers * one.deferred
    messages = 0.0
    if setting.question.layout.pp > 1:
        first = chunk.runs[0]
        received = not chunk.first and not common.blocks[first.experts, first.window].held_input
        messages = common.stream * (received + (not chunk.last))
    casts = 0.0
    if setting.keeps_casts:
        casts = compute * (chunk.blocks.whole + (setting.question.model.hidden if chunk.last else 0))
    if not chunk.last:
        return Kept(blocks, common.tables, 0.0, casts, 0.0, messages, deferred)
    others = common.tables + common.norm
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
    if question.layout.pp > 1:
        buffers += _messages(scene, moment)
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
    """A gradient that is received ahead, and those that were sent: gloo, which cannot be asked, keeps all of them."""
    chunks = scene.place.chunks
    ahead = moment.begun and not chunks[moment.chunk].last
    senders = sum(1 for chunk in chunks if not chunk.first)
    layout = scene.setting.question.layout
    if layout.schedule in V_SHAPED and scene.rank == layout.pp - 1:
        senders -= 1  # at the bottom of a V the stage before is here
    sent = moment.done if scene.setting.work.cpu else min(1, moment.done)
    return (ahead + sent * senders // len(chunks)) * scene.setting.common.stream


def _in_the_loss(scene: Scene, moment: Moment, chunk: Chunk, base: Instant) -> Instant:
    found = scene.setting.common.loss
    return Instant(
        "loss",
        scene.gradients.there(moment, chunk, None),
        base.activations + found.hidden,
        base.logits - found.resting + found.peak,
        base.buffers + found.weight + scene.gradients.in_the_loss(chunk),
        base.host,
        base.nvme,
    )


def _in_the_blocks(scene: Scene, moment: Moment, chunk: Chunk, base: Instant) -> Iterator[Instant]:
    """The last blocks of every run of equal ones, and the first blocks of all."""
    kept, common, compute = scene.kept[moment.chunk], scene.setting.common, scene.setting.hold.compute
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
        # Beside the blocks next to the ends more is gathered and sent than beside those at the ends.
        for done in {0, min(1, last), max(0, last - 1)} if in_units else {0, last}:
            before = base._replace(
                activations=base.activations - done * freed, buffers=base.buffers - done * cast
            )
            yield from _in_a_block(scene, moment, chunk, run, after + done, before)
        base = base._replace(
            activations=base.activations - run.layers * freed, buffers=base.buffers - run.layers * cast
        )
        after += run.layers


def _let_go(scene: Scene, moment: Moment, one: Block) -> float:
    """What a block's backward pass frees on the device. If it is split, some is still needed."""
    on_device = 1 - scene.away.share_of_activations
    return one.resting * on_device - (one.deferred if moment.split else 0.0)


def _in_a_block(
    scene: Scene, moment: Moment, chunk: Chunk, run: Run, blocks: int, base: Instant
) -> Iterator[Instant]:
    """Moments of one block's backward pass: its fullest activations; its first product; under zero=3, its end."""
    setting, gradients = scene.setting, scene.gradients
    one, compute = setting.common.blocks[run.experts, run.window], setting.hold.compute
    name = "first block" if blocks == chunk.layers - 1 else "last block" if blocks == 0 else "block"
    grads = gradients.there(moment, chunk, blocks, run)
    buffers = base.buffers + gradients.in_a_block(chunk, run, blocks) + one.exchange
    if setting.casts_again:
        buffers += run.part.whole * compute
    # By then the projection out of the MLP is done, unless its weight's gradient is put off.
    used = gradients.first_made(run) * compute if setting.casts_again or setting.keeps_casts else 0
    still = one.inner if moment.split else 0.0
    activations = base.activations + one.working + still
    yield Instant(name, grads, activations, base.logits, buffers - used, base.host, base.nvme)
    if gradients.way != "units":
        made = buffers + gradients.adding(moment, run, one.inner)
        yield Instant(name, grads, base.activations + one.opening, base.logits, made, base.host, base.nvme)
    else:
        left = base.activations - _let_go(scene, moment, one) + setting.common.stream
        late = base.buffers + gradients.after_a_unit(chunk, run, blocks)
        grads = gradients.there(moment, chunk, blocks)
        yield Instant(name, grads, left, base.logits, late, base.host, base.nvme)
