"""Time of expert parallelism: what a micro-batch waits for while tokens travel to their experts and back.

All-to-alls end when the busiest rank has received its tokens (``facts/expert_load.py``). Where every token also uses a
shared expert, that one's products are computed meanwhile, forward and backward.

A token is sent once for each of its experts, whichever nodes these are on. Some stacks send it to a node once and pass
it on over the fast links there (``Stack.sends_once``); a router that limits a token to the experts of a few nodes
(``active_groups``) then limits how many copies leave one. Some compute one micro-batch while another's tokens travel
(``Stack.expert_overlap``).
"""

from __future__ import annotations

from shoal.facts.expert_load import busiest
from shoal.facts.model import Experts
from shoal.predict.collective_call import Phase
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.layer import LayerShare
from shoal.predict.traffic.expert import tokens
from shoal.predict.workload import Workload


def waits(workload: Workload, on: CostModel, here: RankParameters, share: LayerShare) -> dict[Phase, float]:
    """Seconds of one micro-batch in the ranks of ``ep``, by pass. ``share``: of a layer with experts."""
    if workload.layout.ep == 1 or not here.sparse:
        return {}
    _, ranks, stride = workload.ranks_of("ep")
    uneven = busiest(workload.layout.ep)
    if on.stack.sends_once and workload.model.experts is not None:
        uneven *= copies(workload.model.experts, ranks / on.links.neighbours(ranks, stride))
    found: dict[Phase, float] = {}
    for call in tokens(workload, here):
        if call.group == "ep":
            each = on.links.seconds(call.op, round(call.bytes * uneven), ranks, stride)
            found[call.phase] = found.get(call.phase, 0.0) + each * call.count / workload.accumulation
    total, layer = sum(found.values()), on.layer(share)
    if on.stack.expert_overlap and total:
        hidden = on.stack.expert_overlap * min(total, here.sparse * (layer.forward + layer.backward))
        return {phase: seconds * (1 - hidden / total) for phase, seconds in found.items()}
    forward, backward = on.shared_experts(share)
    return {
        phase: seconds
        - on.stack.overlap * min(seconds, here.sparse * (backward if phase == "backward" else forward))
        for phase, seconds in found.items()
    }


def copies(experts: Experts, domains: float) -> float:
    """Of the copies of a token, one for each of its experts, those that go to different ones of so many nodes."""
    if domains <= 1:
        return 1.0
    # Experts that are drawn one by one, from groups that are each on one node or on several.
    most = domains if experts.active_groups == experts.groups else min(domains, experts.active_groups)
    return most * (1 - (1 - 1 / most) ** experts.active) / experts.active
