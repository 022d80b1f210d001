"""Time of expert parallelism: what a micro-batch waits for while tokens travel to their experts and back.

All-to-alls end when the busiest rank has received its tokens (``facts/expert_load.py``). Where every token also uses a
shared expert, that one's products are computed meanwhile, forward and backward.

Where experts are on several nodes, a token crosses to each once and is passed on inside it, in parts: one is passed on
while the other crosses, or is computed (``_by_part``). How many nodes a token reaches is what even routing comes to,
within the groups that the router limits it to. Other stacks send each copy to its rank, over the slow links
(``Stack.sends_once``); pass on at once what has come (``Stack.passes_on``); or compute one micro-batch while the tokens
of another travel (``Stack.expert_overlap``).
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
    """Seconds of one micro-batch in the ranks of ``ep``, by group and pass. ``share``: of a layer with experts."""
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
    """Of each pass's exchanges, the part that nothing hides."""
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
    """Seconds that a pass waits for its exchanges, there and back, where tokens travel in so many parts.

    Each link, and the device, has one part at a time, in order. The backward pass is this one in reverse, and takes as
    long.
    """
    over, near, work = across / 2 / parts, inside / 2 / parts, experts / parts
    every = range(parts)
    # When each part has come to the node; to its experts, once the device has passed it on; is computed.
    come = [over * (part + 1) for part in every]
    ready = shared  # what the device computes first
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
        ready = max(ready, free)  # no part's results are added up before all are computed
        home = max(ready, home) + over
    return home - experts - shared
