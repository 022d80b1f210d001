"""Traffic of expert parallelism (``ep``): tokens to their experts and back, and the experts' gradients and states.

Assumes balanced routing: real traffic depends on the router, and a dry run sends the balanced amount. t = tokens of a
micro-batch (all tokens of a tensor group), c = compute width, w = c but at least 4. For every layer with experts and
every micro-batch:

    ep > 1           all-to-all over ``ep`` of token counts                           8 · experts
                     and of tokens to their experts, and of the results back          t · active · hidden / tp · c each
                     on n nodes, of which a token reaches r on average (``facts/expert_load.py``), over ``ep across``
                     of counts, tokens and results                                    p · 8 · (experts + n),
                                                                       r · t · (hidden / tp + 2 · active) · c, and
                                                                                      r · t · hidden / tp · c
                     and over ``ep inside`` as over ``ep``, for the node's experts    p · 8 · experts / n, also twice;
                     tokens and results in p parts (``facts/layout/expert_nodes.parts_over``)
    and tp > 1       all-gather over ``tp`` of received tokens, reduce-scatter of     t · active · hidden · c each
                     the experts' outputs
    tp > 1, sp=1     all-gather over ``tp`` of tokens' experts, and of their weights  t · active · 8, and · w
    router_aux       all-reduce over ``tp`` (sp=1) and ``cp`` of tokens per expert    sequences · experts · w each

Backward mirrors everything that moves tokens or weights; with sp=0 there is also an all-reduce of the weights'
gradients. Recomputing a forward pass repeats all of its traffic.

Experts live on the fastest ``ep`` ranks of dp·fsdp·cp. The remaining ranks of these axes hold the same experts and
treat them like other parameters, over what ``ep`` leaves of the groups: they shard them as ``zero`` says, with the
experts of ``unit`` layers as one unit, or reduce their gradients in buckets. Tensor ranks split every expert's
features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.facts.layout.buckets import Unit, even_share, units
from shoal.facts.layout.parameter_groups import EXPERTS
from shoal.facts.model import Experts
from shoal.facts.precision import compute_width, gradient_width
from shoal.predict.collective_call import CollectiveCall, Phase
from shoal.predict.rank_parameters import (
    RankParameters,
    RankTensor,
    expert_elements,
    expert_tensors,
    padded_size,
    with_gradients,
)
from shoal.predict.traffic import replicate, shard
from shoal.predict.traffic.shard import EqualPayloads
from shoal.predict.workload import Workload


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    """Cheap approximation as far as buckets and units are concerned; the rest is exact."""
    return (*tokens(workload, here), *states(workload, here)) if here.sparse else ()


def tokens(workload: Workload, here: RankParameters) -> list[CollectiveCall]:
    """Collectives that move tokens, and the router's results for them."""
    layout = workload.layout
    times = workload.accumulation * here.sparse
    if not times or (layout.ep == 1 and layout.tp == 1):
        return []
    found = [_again(call, phase) for call in _forward(workload) for phase in _passes(workload)]
    return [
        CollectiveCall(op, group, size, times * count, phase)
        for op, group, size, count, phase in (*found, *_backward(workload))
    ]


_Part = tuple[str, str, int, int, Phase]


def _passes(workload: Workload) -> list[Phase]:
    """A compiled block saves what it received, unless it recomputes everything."""
    keeps = ("none", "selective") if workload.compiled else ("none",)
    return ["forward"] if workload.layout.recompute in keeps else ["forward", "recompute"]


def _again(part: _Part, phase: Phase) -> _Part:
    return (*part[:4], phase)


def _weights(workload: Workload, experts: Experts) -> int:
    """Bytes of the routing weights of all token copies in a micro-batch."""
    return workload.tokens * experts.active * max(4, compute_width(workload.recipe))


def _forward(workload: Workload) -> Iterator[_Part]:
    layout, experts = workload.layout, workload.model.experts
    assert experts is not None
    weights = _weights(workload, experts)
    if workload.recipe.router_aux:
        counts = workload.micro * experts.count * max(4, compute_width(workload.recipe))
        for axis in ("tp" if layout.sp else "", "cp"):
            if axis and getattr(layout, axis) > 1:
                yield "all_reduce", axis, counts, 1, "forward"
    if layout.tp > 1 and layout.sp:
        yield "all_gather", "tp", weights, 1, "forward"
        yield "all_gather", "tp", workload.tokens * experts.active * 8, 1, "forward"
    if layout.ep > 1:
        yield from _counts(workload, experts)
        yield from _travelling(workload, experts, "forward")


def _counts(workload: Workload, experts: Experts) -> Iterator[_Part]:
    """Token counts, exchanged before the tokens."""
    across, inside = workload.expert_nodes
    nodes, parts = across.size, workload.expert_parts
    if nodes > 1:
        yield "all_to_all", across.name, parts * 8 * (experts.count + nodes), 1, "forward"
    if inside.size > 1:
        yield "all_to_all", inside.name, parts * 8 * experts.count // nodes, 1, "forward"


def _travelling(workload: Workload, experts: Experts, phase: Phase) -> Iterator[_Part]:
    """Tokens and the experts' outputs; backward, the gradients of both."""
    (across, inside), tp = workload.expert_nodes, workload.layout.tp
    compute, hidden = compute_width(workload.recipe), workload.model.hidden
    for tokens, count in workload.token_parts:
        copies = tokens * experts.active * hidden * compute
        if across.size > 1:
            rows, width = workload.crossing_of(tokens), hidden // tp
            yield "all_to_all", across.name, rows * (width + 2 * experts.active) * compute, count, phase
            yield "all_to_all", across.name, rows * width * compute, count, phase
        if inside.size > 1:
            yield "all_to_all", inside.name, copies // tp, 2 * count, phase
        if tp > 1:
            yield "all_gather", "tp", copies, count, phase
            yield "reduce_scatter", "tp", copies, count, phase


def _backward(workload: Workload) -> Iterator[_Part]:
    layout, experts = workload.layout, workload.model.experts
    assert experts is not None
    if layout.tp > 1:
        op = "reduce_scatter" if layout.sp else "all_reduce"
        yield op, "tp", _weights(workload, experts), 1, "backward"
    if layout.ep > 1:
        yield from _travelling(workload, experts, "backward")


def states(workload: Workload, here: RankParameters) -> list[CollectiveCall]:
    """Cheap approximation: exact total bytes, in about the right number of buckets."""
    if not here.sparse:
        return []
    group = workload.groups[EXPERTS]
    shards = group.sharded.size
    elements = expert_elements(workload.model, workload.layout.tp, workload.layout.ep)
    if not group.trained and not group.fully_sharded:
        return []
    if shards == 1:
        count = _bucket_count(workload, here)
        return replicate.bucket_calls(workload, [(elements * here.sparse // count, count)], group)
    count = (
        even_share(here.sparse, workload.layout.unit) if group.zero == 3 else _bucket_count(workload, here)
    )
    each = even_share(elements * here.sparse, count * shards) * shards
    gathers = Unit(()).gathers(each, workload.tune.persist_below)
    narrow = each if _in_four_bits(workload) else 0
    travelling = [EqualPayloads(each, each if group.trained else 0, count, gathers, narrow)]
    return (shard.unit_calls if group.zero == 3 else shard.bucket_calls)(workload, travelling, group)


def exact_states(workload: Workload, here: RankParameters) -> list[CollectiveCall]:
    """Exact collectives by bucket or unit, for each stage of a rank."""
    if not here.sparse:
        return []
    layout, group = workload.layout, workload.groups[EXPERTS]
    shards = group.sharded.size
    found: list[CollectiveCall] = []
    for stage in here.stages:
        routed = expert_tensors(workload.model, layout.tp, layout.ep, stage)
        if not group.trained and not group.fully_sharded:
            continue
        if shards == 1:
            found += replicate.exact(workload, [routed], group)
        elif group.zero < 3:
            found += shard.bucket_calls(workload, shard.flat_buckets(workload, routed, shards), group)
        else:
            made = units(stage.layers, layout.unit, stage.first, stage.last, here.root)
            inside = [[one for one in routed if _block(one) in unit.modules] for unit in made]
            travelling = [_unit(workload, tensors, shards) for tensors in inside if tensors]
            found += shard.unit_calls(workload, travelling, group)
    return found


def _block(tensor: RankTensor) -> str:
    return ".".join(tensor.label.split(".")[:3])


def _unit(workload: Workload, tensors: Sequence[RankTensor], shards: int) -> EqualPayloads:
    elements = sum(padded_size(tensor, shards) for tensor in tensors)
    gathers = Unit(()).gathers(sum(tensor.size for tensor in tensors), workload.tune.persist_below)
    moving = with_gradients(workload, tensors) if workload.groups[EXPERTS].trained else []
    reduced = sum(padded_size(tensor, shards) for tensor in moving)
    return EqualPayloads(elements, reduced, 1, gathers, elements if _in_four_bits(workload) else 0)


def _in_four_bits(workload: Workload) -> bool:
    return workload.lora is not None and workload.lora.base == "nf4"


def _bucket_count(workload: Workload, here: RankParameters) -> int:
    """Three tensors per layer, each with all of this rank's experts; a bucket takes as many as fit, at least one."""
    size = (
        expert_elements(workload.model, workload.layout.tp, workload.layout.ep)
        // 3
        * gradient_width(workload.recipe)
    )
    return even_share(3 * here.sparse, max(1, replicate.bucket_bytes(workload) // size))
