"""Step time: compute, exposed communication, bubble, optimizer, offload.

Times are those of the rank whose stage takes longest; with the pipeline's idle time they add up to the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from shoal.facts.model import Model
from shoal.facts.parameter_groups import DENSE
from shoal.facts.precision import compute_width, state_width
from shoal.facts.recipe import Recipe
from shoal.facts.stack import Stack
from shoal.predict import host as hosts

# Who prices a step also makes its bench.
from shoal.predict.bench import Bench as Bench
from shoal.predict.bench import bench as bench
from shoal.predict.bubble import idle
from shoal.predict.call import Call
from shoal.predict.layer import Seconds, Share
from shoal.predict.measured import MeasuredKernels
from shoal.predict.memory.micro_batch import micro_batch_bytes
from shoal.predict.question import Question
from shoal.predict.rank_parameters import RankParameters, rank_parameters, stages_here, trained_with_experts
from shoal.predict.traffic import calls
from shoal.predict.transfer import transfer

# Bytes an optimizer moves for each parameter it updates: AdamW reads gradient, weight and two moments and writes all
# but the gradient (beside a master copy the gradient is half as wide, and the weight is written twice). Clipping
# reads the gradient, then reads and writes it.
OPTIMIZER_BYTES = {"adamw": 28.0, "sgd": 20.0}
CLIPPING_BYTES = {"cast": 12.0, "master": 6.0}

ALWAYS = ("forward", "backward", "recompute")


@dataclass(slots=True)
class Step:
    """Where the seconds of one step go."""

    compute: float  # forward and backward, on the device
    recompute: float
    exposed_comm: float
    bubble: float
    optimizer: float
    offload: float
    other: float  # waiting for the host
    links: dict[str, float] = field(default_factory=dict)  # exposed communication by group

    @property
    def seconds(self) -> float:
        return (
            self.compute
            + self.recompute
            + self.exposed_comm
            + self.bubble
            + self.optimizer
            + self.offload
            + self.other
        )


@dataclass(slots=True)
class Rank:
    """One micro-batch on one rank of the pipeline, and what happens once a step."""

    compute: float
    recompute: float
    exposed: float
    other: float
    once: float  # exposed communication once a step
    links: dict[str, float]

    @property
    def micro_batch(self) -> float:
        return self.compute + self.recompute + self.exposed + self.other


def step(question: Question, on: Bench | None = None) -> Step:
    """The time ledger."""
    on = on or bench(question)
    layout, model = question.layout, question.model
    kinds = stage_kinds(model, layout.pp, layout.chunks, layout.schedule, question.cut_by)
    ranks = [(_rank(question, on, kind.stage), kind.ranks) for kind in kinds]
    slowest, _ = max(ranks, key=lambda pair: pair[0].micro_batch)
    times = question.accumulation
    waits = idle(layout.schedule, layout.pp, layout.chunks, times)
    bubble = messages = 0.0
    if layout.pp > 1:
        # What the other ranks take, on the way to the slowest and back.
        others = sum(count * rank.micro_batch for rank, count in ranks) - slowest.micro_batch
        bubble = waits.work * others / (layout.pp - 1)
        messages = waits.messages * _message(question, on)
    optimizer = _optimizer(question, on)
    moved = transfer(question, on.links.host, times * slowest.compute, *_offloadable(question))
    links = {group: seconds * times for group, seconds in slowest.links.items()}
    links["pp"] = links.get("pp", 0.0) + messages
    return Step(
        compute=times * slowest.compute,
        recompute=times * slowest.recompute,
        exposed_comm=times * slowest.exposed + slowest.once + messages,
        bubble=bubble,
        optimizer=0.0 if moved.updates else optimizer,
        offload=moved.seconds,
        other=times * slowest.other + hosts.once(question, on, optimizer),
        links=links,
    )


class Kind(NamedTuple):
    """Ranks of a pipeline that compute alike."""

    dense: int  # layers without experts
    sparse: int  # and with them
    first: bool
    last: bool
    ranks: int  # how many they are
    stage: int  # one of them


@cache
def stage_kinds(model: Model, pp: int, chunks: int, schedule: str, seq: int | None) -> tuple[Kind, ...]:
    """Ranks of a pipeline that differ in what they compute."""
    seen: dict[tuple[int, int, bool, bool], list[int]] = {}
    for stage in range(pp):
        stages = stages_here(model, pp, chunks, schedule, seq, stage)
        sparse = sum(model.has_experts(number) for one in stages for number in one.layers)
        total = sum(len(one.layers) for one in stages)
        seen.setdefault((total - sparse, sparse, stages[0].first, stages[-1].last), []).append(stage)
    return tuple(Kind(*what, len(alike), alike[0]) for what, alike in seen.items())


def _rank(question: Question, on: Bench, stage: int) -> Rank:
    """What one micro-batch takes on one rank, and what it does once a step."""
    layout, model, stack = question.layout, question.model, on.stack
    here = rank_parameters(layout, model, question.cut_by, stage)
    body, ends = _computed(question, on, here)
    forward, backward, again = body.forward, body.backward, 0.0
    if layout.recompute != "none":
        again = body.full if layout.recompute == "full" else body.again
    spent, once, alone = _communicated(question, on, stage)

    # The host starts every layer's kernels; it is hidden where the device is the slower of the two.
    host = hosts.of_layer(on, layout.recompute)
    times = here.layers * hosts.spread(layout.tp)
    within = {phase: sum(spent[phase].values()) for phase in ALWAYS}
    waiting = hosts.waiting(
        on,
        (forward + within["forward"], times * host.forward),
        (ends.forward + ends.backward, hosts.of_ends(question, on, here.first, here.last)),
        (backward + within["backward"], times * host.backward),
        (again + within["recompute"], times * host.again) if again else None,
        question.accumulation if layout.pp == 1 else 1,
    )

    exposed = sum(within.values())
    links: dict[str, float] = {}
    for phase in ALWAYS:
        for group, seconds in spent[phase].items():
            links[group] = links.get(group, 0.0) + seconds
    # What data ranks exchange travels beside the computation, and slows it. The first unit that is gathered, and the
    # last whose gradients are summed, have nothing to hide behind.
    for beside, computed in (("beside forward", forward), ("beside backward", backward + again)):
        total = sum(spent[beside].values())
        if total:
            left = total - stack.overlap * min(total - alone[beside], computed)
            exposed += left
            for group, seconds in spent[beside].items():
                links[group] = links.get(group, 0.0) + seconds * left / total
    single = 0.0
    for beside, computed in (("forward", forward), ("backward", backward + again), ("nothing", 0.0)):
        total = sum(once[beside].values())
        single += total - stack.overlap * min(total, computed)
    return Rank(
        compute=forward + backward + ends.forward + ends.backward,
        recompute=again,
        exposed=exposed,
        other=waiting,
        once=single,
        links=links,
    )


def _computed(question: Question, on: Bench, here: RankParameters) -> tuple[Seconds, Seconds]:
    """Device time of one micro-batch: of this rank's layers; of embedding and head."""
    layout, model = question.layout, question.model
    tokens = question.tokens
    group = question.groups[DENSE]
    sharded = group.zero == 3 and group.sharded.size > 1
    handled = on.handling(sharded, question.accumulation)
    between = tokens / layout.tp if layout.sp else float(tokens)
    sums = [0.0] * 5
    for count, experts in ((here.dense, False), (here.sparse, True)):
        if count:
            share = Share(
                tokens, between, question.micro, question.recipe.seq, layout.tp, layout.ep, experts, handled
            )
            for place, seconds in enumerate(on.layer(share)):
                sums[place] += count * seconds
    rows = -(-model.vocab // layout.tp)
    ends = [0.0] * 5
    if here.first:
        found = on.embedding(tokens, rows, handled, tied_here=model.tied and here.last)
        ends = [a + b for a, b in zip(ends, found, strict=True)]
    if here.last:
        found = on.head(tokens, rows, handled)
        ends = [a + b for a, b in zip(ends, found, strict=True)]
    if question.lora is not None:
        # Frozen weights have no gradients; those of the additions are too small to see.
        sums[2] = ends[2] = 0.0
    return Seconds(*sums), Seconds(*ends)


Spent = dict[str, dict[str, float]]


def _communicated(question: Question, on: Bench, stage: int) -> tuple[Spent, Spent, dict[str, float]]:
    """Seconds by what they happen beside, then by group: of one micro-batch, and once a step.

    Last, of what happens beside a pass for every micro-batch, the longest single call.
    """
    spent: Spent = {key: {} for key in (*ALWAYS, "beside forward", "beside backward")}
    once: Spent = {key: {} for key in ("forward", "backward", "nothing")}
    alone = {"beside forward": 0.0, "beside backward": 0.0}
    times = question.accumulation
    each_time = question.layout.pp == 1
    for call in calls(question, stage):
        if call.phase in ("message", "control"):
            continue
        ranks = question.ranks_of(call.group)
        each = on.links.seconds(call.op, call.bytes, ranks.size, ranks.stride)
        seconds = call.count * each
        place, divided = _place(call, each_time, question.layout.zero)
        table = spent[place] if divided else once[place]
        table[call.group] = table.get(call.group, 0.0) + (seconds / times if divided else seconds)
        if place in alone:
            alone[place] = max(alone[place], each)
    return spent, once, alone


def _place(call: Call, each_time: bool, zero: int) -> tuple[str, bool]:
    """Beside what a call happens, and whether for every micro-batch."""
    if call.phase in ALWAYS:
        return call.phase, True
    if call.phase == "gather forward":
        return ("beside forward", True) if each_time else ("forward", False)
    if call.phase == "gather backward":
        return ("beside backward", True) if each_time else ("backward", False)
    if call.phase == "gradients":
        if call.group in ("tp", "tp copies", "pp ends"):
            return "nothing", False
        scattered_each_time = each_time and zero > 1 and call.op == "reduce_scatter"
        return ("beside backward", True) if scattered_each_time else ("backward", False)
    return "nothing", False


def _message(question: Question, on: Bench) -> float:
    """One message between neighbours in the pipeline."""
    layout = question.layout
    size = question.tokens * question.model.hidden * compute_width(question.recipe)
    _, ranks, stride = question.ranks_of("pp")
    if layout.sp and layout.tp > 1:
        return on.links.seconds("send", size // layout.tp, ranks, stride)
    if on.stack.parts_messages and layout.tp > 1:
        part = on.links.seconds("send", size // layout.tp, ranks, stride)
        return part + on.links.seconds("all_gather", size, layout.tp, 1)
    return on.links.seconds("send", size, ranks, stride)


def _optimizer(question: Question, on: Bench) -> float:
    """The update of what the fullest rank owns."""
    here = rank_parameters(question.layout, question.model, question.cut_by, 0)
    return update_seconds(on, trained_with_experts(question, here) / question.groups[DENSE].sharded.size)


def update_seconds(on: Bench, elements: float) -> float:
    """Clipping and updating so many parameters."""
    if isinstance(on.kernels, MeasuredKernels):
        return on.kernels.updated(elements, on.recipe.optimizer, bool(on.recipe.clip))
    return on.kernels.moved(elements * update_bytes(on.recipe, on.stack))


def update_bytes(recipe: Recipe, stack: Stack) -> float:
    """Bytes that clipping and the optimizer move for a parameter."""
    each = OPTIMIZER_BYTES[recipe.optimizer] + (CLIPPING_BYTES[stack.weights] if recipe.clip else 0.0)
    return each * (1.0 if stack.weights == "master" else state_width(recipe) / 4)


def _offloadable(question: Question) -> tuple[float, float, float]:
    """What a rank updates, in parameters; keeps of a step's activations, and of parameters at rest, in bytes."""
    layout, recipe = question.layout, question.recipe
    if not layout.offload:
        return 0.0, 0.0, 0.0
    here = rank_parameters(layout, question.model, question.cut_by, 0)
    elements = trained_with_experts(question, here)
    owned = elements / question.groups[DENSE].sharded.size
    kept = sum(
        count
        * max(
            block.resting
            for (sparse, _), block in micro_batch_bytes(question).blocks.items()
            if sparse == kind
        )
        for count, kind in ((here.dense, False), (here.sparse, True))
        if count
    )
    resting = (owned if layout.zero == 3 else elements) * compute_width(recipe)
    return owned, kept * question.accumulation, resting
