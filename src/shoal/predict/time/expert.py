"""Time of expert parallelism: what a micro-batch waits for while tokens travel to their experts and back.

All-to-alls end when the busiest rank has received its tokens (``facts/expert_load.py``). Shared experts, if any, are
computed meanwhile, forward and backward.

With experts on several nodes, a token crosses to each node once and is forwarded inside it, in parts: one part is
forwarded while another crosses or is computed (``_by_part``). The number of nodes per token assumes even routing
within the groups that the router allows. Other stacks send each copy to its rank over the slow links
(``Stack.sends_once``); forward immediately what arrives (``Stack.passes_on``); or compute one micro-batch while
another's tokens travel (``Stack.expert_overlap``).
"""

from __future__ import annotations

from shoal.facts.expert_load import busiest
from shoal.facts.layout.expert_nodes import EXCHANGES
from shoal.predict.collective_call import Phase
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.layer import LayerShare
from shoal.predict.traffic.expert import tokens
from shoal.predict.workload import Workload


def waits(
    workload: Workload, on: CostModel, here: RankParameters, share: LayerShare
) -> dict[str, dict[Phase, float]]:
    """Exposed seconds of one micro-batch over ``ep``, by group and pass. ``share``: of a layer with experts."""
    if workload.layout.ep == 1 or not here.sparse:
        return {}
    uneven = busiest(workload.layout.ep)
    found: dict[str, dict[Phase, float]] = {}
    for call in tokens(workload, here):
        if call.group in EXCHANGES:
            _, ranks, stride = workload.ranks_of(call.group)
            each = on.links.seconds(call.op, round(call.bytes * uneven), ranks, stride)
            spent = found.setdefault(call.group, {})
            spent[call.phase] = spent.get(call.phase, 0.0) + each * call.count / workload.accumulation
    if on.stack.passes_on:
        found = dict([max(found.items(), key=lambda one: sum(one[1].values()))])
    left = _left(found, on, here, share)
    return {
        group: {phase: seconds * left[phase] for phase, seconds in spent.items()}
        for group, spent in found.items()
    }


def _left(
    found: dict[str, dict[Phase, float]], on: CostModel, here: RankParameters, share: LayerShare
) -> dict[Phase, float]:
    """For each pass, the share of its exchanges that nothing hides."""
    totals: dict[Phase, float] = {}
    for spent in found.values():
        for phase, seconds in spent.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    total = sum(totals.values())
    if on.stack.expert_overlap and total:
        layer = on.layer(share)
        hidden = on.stack.expert_overlap * min(total, here.sparse * (layer.forward + layer.backward))
        return dict.fromkeys(totals, 1 - hidden / total)
    shared, routed = on.shared_experts(share), on.routed_experts(share)
    left: dict[Phase, float] = {}
    for phase, seconds in totals.items():
        beside, experts = (here.sparse * work[phase == "backward"] for work in (shared, routed))
        hidden = min(seconds, beside)
        if share.expert_parts > 1:
            across, inside = (found.get(group, {}).get(phase, 0.0) for group in EXCHANGES[1:])
            hidden = seconds - _by_part(across, inside, experts, beside, share.expert_parts)
        left[phase] = 1 - on.stack.overlap * hidden / seconds if seconds else 1.0
    return left


def _by_part(across: float, inside: float, experts: float, shared: float, parts: int) -> float:
    """Exposed seconds of a pass's exchanges, there and back, when tokens travel in ``parts`` parts.

    Each link, and the device, handles one part at a time, in order. The backward pass is the reverse and takes as
    long.
    """
    over, near, work = across / 2 / parts, inside / 2 / parts, experts / parts
    every = range(parts)
    # When each part has reached the node; its experts, once forwarded; and the end of its computation.
    come = [over * (part + 1) for part in every]
    ready = shared  # the device computes shared experts first
    passed, free = [], 0.0
    for part in every:
        ready = max(ready, come[part])
        free = max(ready, free) + near
        passed.append(free)
    computed = []
    for part in every:
        ready = max(ready, passed[part]) + work
        computed.append(ready)
    home = come[-1]
    for part in every:
        free = max(computed[part], free) + near
        ready = max(ready, free)  # results are summed only after all parts are computed
        home = max(ready, home) + over
    return home - experts - shared
