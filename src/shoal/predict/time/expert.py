"""Time of expert parallelism: what a micro-batch waits for while tokens travel to their experts and back.

All-to-alls end when the busiest rank has received its tokens (``facts/expert_load.py``). Where every token also uses a
shared expert, that one's products are computed meanwhile, forward and backward. A router that limits a token to the
experts of a few nodes (``active_groups``) changes nothing here: a token is sent once for each of its experts, whichever
nodes these are on, and so as many copies leave a node.
"""

from __future__ import annotations

from shoal.facts.expert_load import busiest
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
    found: dict[Phase, float] = {}
    for call in tokens(workload, here):
        if call.group == "ep":
            each = on.links.seconds(call.op, round(call.bytes * uneven), ranks, stride)
            found[call.phase] = found.get(call.phase, 0.0) + each * call.count / workload.accumulation
    forward, backward = on.shared_experts(share)
    return {
        phase: seconds
        - on.stack.overlap * min(seconds, here.sparse * (backward if phase == "backward" else forward))
        for phase, seconds in found.items()
    }
