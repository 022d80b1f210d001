"""Step time: compute, exposed communication, bubble, optimizer, offload.

Times are those of the rank with the slowest stage; with the pipeline's idle time they add up to the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from shoal.facts.cluster.stack import Stack
from shoal.facts.layout import Layout
from shoal.facts.layout.expert_nodes import EXCHANGES
from shoal.facts.layout.parameter_groups import DENSE, EXPERTS, RankGroup
from shoal.facts.model import Model
from shoal.facts.optimizers import ITERATIONS
from shoal.facts.precision import MOMENT_BYTES, compute_width, state_width
from shoal.facts.recipe import Recipe
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.memory.micro_batch import micro_batch_bytes
from shoal.predict.offload_cut import share_away
from shoal.predict.optimizer_matrices import ranks_together, shapes
from shoal.predict.rank_parameters import RankParameters, rank_parameters, stages_here, trained_with_experts
from shoal.predict.time import context, expert
from shoal.predict.time import host as hosts
from shoal.predict.time.bubble import idle

# Re-exported: callers that price a step also build its cost model.
from shoal.predict.time.cost_model import CostModel as CostModel
from shoal.predict.time.cost_model import cost_model as cost_model
from shoal.predict.time.layer import LayerShare, Seconds, WeightStorage, WeightTraffic
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.offload import Offloadable, OverlappableCompute, Shares, Transfer, transfer
from shoal.predict.traffic import calls
from shoal.predict.workload import Workload

# Bytes that the optimizer moves per updated parameter: AdamW reads gradient, weight and two moments and writes all but
# the gradient (with a master copy the gradient is half as wide, and the weight is written twice). Clipping reads the
# gradient, then reads and writes it.
# Lion, Muon and Adafactor run operator by operator instead of as one kernel, so each operator reads and writes.
OPTIMIZER_BYTES = {"adamw": 28.0, "sgd": 20.0, "lion": 100.0, "muon": 110.0, "adafactor": 120.0}
CLIPPING_BYTES = {"cast": 12.0, "master": 6.0, "working": 12.0}

# Collectives between a part of the sequence and the whole of it.
SEQUENCE_OPS = ("all_gather", "reduce_scatter")

ALWAYS = ("forward", "backward", "recompute")


@dataclass(slots=True)
class StepTime:
    """The time ledger: where the seconds of one step go."""

    compute: float  # forward and backward on the device
    recompute: float
    exposed_comm: float
    bubble: float
    optimizer: float
    offload: float
    other: float  # waiting for the host, and for the slowest device
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
class RankTime:
    """Time of one micro-batch on one pipeline rank, plus what happens once per step."""

    compute: float
    recompute: float
    exposed: float
    other: float
    once: float  # exposed communication once per step
    lead: float  # seconds that the host is ahead
    links: dict[str, float]
    beside: OverlappableCompute

    @property
    def micro_batch(self) -> float:
        return self.compute + self.recompute + self.exposed + self.other


def step(workload: Workload, on: CostModel | None = None) -> StepTime:
    """Compute the time ledger."""
    on = on or cost_model(workload)
    layout, model = workload.layout, workload.model
    kinds = stage_kinds(model, layout.pp, layout.chunks, layout.schedule, workload.cut_by)
    ranks = [(_rank(workload, on, kind.stage), kind.ranks) for kind in kinds]
    slowest, _ = max(ranks, key=lambda pair: pair[0].micro_batch)
    times = workload.accumulation
    waits = idle(layout.schedule, layout.pp, layout.chunks, times)
    bubble = messages = 0.0
    if layout.pp > 1:
        # The time of all other ranks, between the pipeline's ends and the slowest rank.
        others = sum(count * rank.micro_batch for rank, count in ranks) - slowest.micro_batch
        bubble = waits.work * others / (layout.pp - 1)
        steady = 2 * layout.chunks * times if on.stack.waits_for_messages and layout.chunks > 1 else 0
        messages = max(waits.messages, steady) * _message(workload, on)
    optimizer = _optimizer(workload, on)
    moved = Transfer(0.0, 1.0)
    if layout.offload:
        away = Shares(*(share_away(workload, what) for what in Shares._fields))
        moved = transfer(workload, on.node, slowest.beside, _offloadable(workload), away, optimizer)
    behind = hosts.slowest(layout.world, on.rates.device.spread)
    links = {group: seconds * times for group, seconds in slowest.links.items()}
    links["pp"] = links.get("pp", 0.0) + messages
    return StepTime(
        compute=times * slowest.compute,
        recompute=times * slowest.recompute,
        exposed_comm=times * slowest.exposed + slowest.once + messages,
        bubble=bubble,
        optimizer=moved.stays * optimizer,
        offload=moved.seconds,
        other=times * (slowest.other + behind * (slowest.compute + slowest.recompute))
        + hosts.once(workload, on, optimizer, times * slowest.lead),
        links=links,
    )


class RankKind(NamedTuple):
    """Pipeline ranks with the same computation."""

    dense: int  # layers without experts
    sparse: int  # layers with experts
    first: bool
    last: bool
    ranks: int  # number of such ranks
    stage: int  # one of them


@cache
def stage_kinds(model: Model, pp: int, chunks: int, schedule: str, seq: int | None) -> tuple[RankKind, ...]:
    """The pipeline's ranks, grouped by what they compute."""
    seen: dict[tuple[int, int, bool, bool], list[int]] = {}
    for stage in range(pp):
        stages = stages_here(model, pp, chunks, schedule, seq, stage)
        sparse = sum(model.has_experts(number) for one in stages for number in one.layers)
        total = sum(len(one.layers) for one in stages)
        seen.setdefault((total - sparse, sparse, stages[0].first, stages[-1].last), []).append(stage)
    return tuple(RankKind(*what, len(alike), alike[0]) for what, alike in seen.items())


def _rank(workload: Workload, on: CostModel, stage: int) -> RankTime:
    """Time of one micro-batch on one rank, and of its once-per-step work."""
    layout, model, stack = workload.layout, workload.model, on.stack
    here = rank_parameters(layout, model, workload.cut_by, stage)
    body, ends = _computed(workload, on, here)
    forward, backward, again = body.forward, body.backward, 0.0
    if layout.recompute != "none":
        again = body.full if layout.recompute == "full" else body.again
    spent, once, alone = _communicated(workload, on, stage)
    waits = context.waits(workload, on, here, _share(workload, on, here.dense == 0))
    for way, seconds in waits.items():
        spent[way]["cp"] = seconds
    for group, ways in expert.waits(workload, on, here, _share(workload, on, True)).items():
        for way, seconds in ways.items():
            spent[way][group] = seconds

    # The host launches every layer's kernels; that time is hidden where the device is slower.
    host = hosts.of_layer(on, layout.recompute, workload.compiled, _turns(layout))
    times = here.layers * hosts.spread(layout.tp)
    within = {phase: sum(spent[phase].values()) for phase in ALWAYS}
    waiting = hosts.waiting(
        on,
        (forward + within["forward"], times * host.forward),
        (ends.forward + ends.backward, hosts.of_ends(workload, on, here.first, here.last)),
        (backward + within["backward"], times * host.backward),
        (again + within["recompute"], times * host.again) if again else None,
        None if hosts.ahead(workload, on) else workload.accumulation if layout.pp == 1 else 1,
    )

    exposed = sum(within.values())
    links: dict[str, float] = {}
    for phase in ALWAYS:
        for group, seconds in spent[phase].items():
            links[group] = links.get(group, 0.0) + seconds
    # Data ranks' collectives overlap the computation and slow it down. The first unit gathered, and the last one whose
    # gradients are reduced, have nothing to overlap with.
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
    return RankTime(
        compute=forward + backward + ends.forward + ends.backward,
        recompute=again,
        exposed=exposed,
        other=waiting.seconds,
        once=single,
        lead=waiting.lead,
        links=links,
        beside=OverlappableCompute(forward + ends.forward, backward + ends.backward + again, blocks=forward),
    )


def _computed(workload: Workload, on: CostModel, here: RankParameters) -> tuple[Seconds, Seconds]:
    """Device time of one micro-batch: this rank's layers; embedding and head."""
    layout, model, tokens = workload.layout, workload.model, workload.tokens
    handled = _handled(workload, on)
    sums = [0.0] * 5
    for count, experts in ((here.dense, False), (here.sparse, True)):
        if count:
            for place, seconds in enumerate(on.layer(_share(workload, on, experts))):
                sums[place] += count * seconds
    rows = -(-model.vocab // layout.tp)
    ends = [0.0] * 5
    if here.first:
        found = on.embedding(tokens, rows, handled.dense, tied_here=model.tied and here.last)
        ends = [a + b for a, b in zip(ends, found, strict=True)]
    if here.last:
        found = on.head(tokens, rows, handled.dense, workload.compiled)
        ends = [a + b for a, b in zip(ends, found, strict=True)]
    if workload.lora is not None:
        # Frozen weights have no gradients; those of the adapters are negligible.
        sums[2] = ends[2] = 0.0
    elif workload.recipe.freezes:
        every = workload.recipe.model_copy(update={"groups": ()})
        share = trained_with_experts(workload, here) / trained_with_experts(
            replace(workload, recipe=every), here
        )
        sums[2], ends[2] = share * sums[2], share * ends[2]
    return Seconds(*sums), Seconds(*ends)


def _share(workload: Workload, on: CostModel, experts: bool) -> LayerShare:
    """A rank's share of one of its layers."""
    layout, tokens = workload.layout, workload.tokens
    return LayerShare(
        tokens,
        tokens / layout.tp if layout.sp else float(tokens),
        workload.micro,
        workload.recipe.seq,
        layout.tp,
        layout.ep,
        experts,
        _handled(workload, on),
        workload.compiled,
        workload.recipe.dropout > 0,
        _turns(layout),
        workload.lora is not None and workload.lora.base == "nf4",
        () if workload.lora is None else tuple(workload.lora.targets),
        workload.expert_parts if experts else 1,
    )


def _turns(layout: Layout) -> int:
    """Steps of ring attention."""
    return layout.cp if layout.cp_kind == "ring" else 1


def _handled(workload: Workload, on: CostModel) -> WeightTraffic:
    groups, times = workload.groups, workload.accumulation
    found = [
        on.handling(rests(group.fully_sharded, workload.layout.pp), times, workload.narrow_gradients)
        for group in (groups[DENSE], groups.get(EXPERTS, groups[DENSE]))
    ]
    return WeightTraffic(*found)


def rests(sharded: bool, pp: int) -> WeightStorage:
    """How weights are stored during a step; ``sharded`` as in FSDP."""
    if not sharded:
        return "whole"
    return "gathered" if pp == 1 else "kept"


Spent = dict[str, dict[str, float]]


def _communicated(workload: Workload, on: CostModel, stage: int) -> tuple[Spent, Spent, dict[str, float]]:
    """Communication seconds, by what they overlap and then by group: per micro-batch, and once per step.

    The third result is the longest single call among those that overlap a pass in every micro-batch.
    """
    spent: Spent = {key: {} for key in (*ALWAYS, "beside forward", "beside backward")}
    once: Spent = {key: {} for key in ("forward", "backward", "nothing")}
    alone = {"beside forward": 0.0, "beside backward": 0.0}
    times = workload.accumulation
    each_time = workload.layout.pp == 1
    for call in calls(workload, stage):
        if call.phase in ("message", "control") or call.group in ("cp", *EXCHANGES):
            continue  # ``context`` and ``expert`` price these
        ranks = workload.ranks_of(call.group)
        if call.phase in ALWAYS:
            each = within_pass(on, workload, call, ranks)
        else:
            each = on.links.seconds(call.op, call.bytes, ranks.size, ranks.stride)
        seconds = call.count * each * beside_products(on.stack, workload.layout.sp, call)
        place, divided = _place(call, each_time, workload.layout)
        if call.phase == "update" and call.op == "all_gather" and on.stack.gathers_ahead:
            place = "forward"
        table = spent[place] if divided else once[place]
        table[call.group] = table.get(call.group, 0.0) + (seconds / times if divided else seconds)
        if place in alone:
            alone[place] = max(alone[place], each)
    return spent, once, alone


def within_pass(on: CostModel, workload: Workload, call: CollectiveCall, ranks: RankGroup) -> float:
    """One exchange that a pass waits for: ranks arrive at different times, and some reorder what they receive."""
    each = on.links.seconds(call.op, call.bytes, ranks.size, ranks.stride)
    each += on.stack.arrival * (on.links.neighbours(ranks.size, ranks.stride) - 1)
    if on.stack.copies_sequence and workload.micro > 1 and call.op in SEQUENCE_OPS:
        each += on.kernels.moved(2 * call.bytes)
    return each


def beside_products(stack: Stack, sp: bool, call: CollectiveCall) -> float:
    """The exposed share of a call when tensor ranks overlap the stream's exchange with the products that use it."""
    hides = sp and call.group == "tp" and call.op in ("all_gather", "reduce_scatter")
    return 1 - stack.tensor_overlap if hides and call.phase in ALWAYS else 1.0


def _place(call: CollectiveCall, each_time: bool, layout: Layout) -> tuple[str, bool]:
    """What a call overlaps, and whether it happens in every micro-batch."""
    if call.phase in ALWAYS:
        return call.phase, True
    if call.phase == "gather forward":
        return ("beside forward", True) if each_time else ("forward", False)
    if call.phase == "gather backward":
        return ("beside backward", True) if each_time else ("backward", False)
    if call.phase == "gradients":
        if call.group in ("tp", "tp copies", "pp ends"):
            return "nothing", False
        scattered_each_time = each_time and layout.zero > 1 and call.op == "reduce_scatter"
        if scattered_each_time:
            return "beside backward", True
        return "backward", False
    return "nothing", False


def _message(workload: Workload, on: CostModel) -> float:
    """Seconds of one message between pipeline neighbours."""
    layout = workload.layout
    size = workload.tokens * workload.model.hidden * compute_width(workload.recipe)
    _, ranks, stride = workload.ranks_of("pp")
    if layout.sp and layout.tp > 1:
        return on.links.seconds("send", size // layout.tp, ranks, stride)
    if on.stack.parts_messages and layout.tp > 1:
        part = on.links.seconds("send", size // layout.tp, ranks, stride)
        return part + on.links.seconds("all_gather", size, layout.tp, 1)
    return on.links.seconds("send", size, ranks, stride)


def _optimizer(workload: Workload, on: CostModel) -> float:
    """Seconds of the optimizer on the rank that owns the most."""
    here = rank_parameters(workload.layout, workload.model, workload.cut_by, 0)
    group = workload.groups[DENSE]
    whole = group.sharded.size == 1 or group.zero < 3
    elements = trained_with_experts(workload, here) / group.sharded.size
    seconds = update_seconds(on, elements, whole, workload.narrow_gradients)
    return seconds + (orthogonal_seconds(workload, on, here) if on.recipe.optimizer == "muon" else 0.0)


def orthogonal_seconds(workload: Workload, on: CostModel, here: RankParameters) -> float:
    """Newton-Schulz iterations over the matrices that one rank is dealt."""
    seconds = 0.0
    for shape, count in shapes(workload, here).items():
        short, long = sorted(shape)
        square = on.kernels.product(short, long, short) + on.kernels.product(short, short, short)
        seconds += count * ITERATIONS * (square + on.kernels.product(short, short, long))
    return seconds / ranks_together(workload)


def update_seconds(on: CostModel, elements: float, whole: bool, narrow: bool = False) -> float:
    """Seconds of clipping and updating ``elements`` parameters.

    ``whole``: weights stay whole instead of being gathered on use. ``narrow``: gradients stay in the compute
    precision.
    """
    if isinstance(on.kernels, MeasuredKernels):
        widths = on.kernels.widths
        own = on.kernels.updated(
            elements, on.recipe.optimizer, whole, widths.compute if narrow else widths.states
        )
        return own + (on.kernels.moved(12.0 * elements) if on.recipe.ema else 0.0)
    return on.kernels.moved(elements * update_bytes(on.recipe, on.stack, whole))


def update_bytes(recipe: Recipe, stack: Stack, whole: bool) -> float:
    """Bytes that clipping and the optimizer move per parameter."""
    # The weight average (EMA) reads itself and the weight, and is written.
    average = 12.0 if recipe.ema else 0.0
    each = (
        OPTIMIZER_BYTES[recipe.optimizer] + average + (CLIPPING_BYTES[stack.weights] if recipe.clip else 0.0)
    )
    if stack.weights == "master":
        return each
    state, compute = state_width(recipe), compute_width(recipe)
    # The working copy is written next to the state.
    copy = state + compute if whole and stack.weights == "working" and compute < state else 0.0
    # 8-bit moments are read and written as such.
    lean = 4 * (state - MOMENT_BYTES[recipe.states]) if recipe.blockwise else 0.0
    return each * state / 4 + copy - lean


def _offloadable(workload: Workload) -> Offloadable:
    layout = workload.layout
    here = rank_parameters(layout, workload.model, workload.cut_by, 0)
    shards = workload.groups[DENSE].sharded.size
    kept = sum(
        count
        * max(
            block.resting
            for found, block in micro_batch_bytes(workload).blocks.items()
            if found.experts == kind
        )
        for count, kind in ((here.dense, False), (here.sparse, True))
        if count
    )
    return Offloadable(
        updated=trained_with_experts(workload, here) / shards,
        embedding=here.embedding.elements / shards if workload.lora is None else 0.0,
        weights=resting_bytes(workload, here, shards if layout.zero == 3 else 1),
        activations=kept,
        layers=here.layers,
    )


def resting_bytes(workload: Workload, here: RankParameters, shards: int) -> float:
    """Bytes of parameters, trained or frozen, in the compute precision, for one of ``shards`` ranks."""
    elements = trained_with_experts(replace(workload, lora=None), here)
    return elements / shards * compute_width(workload.recipe)
