"""Time of context parallelism: what a micro-batch waits for because ranks share its sequences.

Ring messages overlap the steps that do not need them yet: all but one of cp attention steps forward, and as many
backward, where the last gradients arrive when nothing is left to compute. A message sent and received at once counts
once. Ulysses exchanges attention's inputs right before use, and hides nothing.
"""

from __future__ import annotations

from shoal.predict.collective_call import Phase
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.layer import LayerShare
from shoal.predict.traffic.context import calls, passes, turn_bytes
from shoal.predict.workload import Workload


def waits(workload: Workload, on: CostModel, here: RankParameters, share: LayerShare) -> dict[Phase, float]:
    """Exposed seconds of one micro-batch on a rank with these layers, by pass. ``share``: its share of one layer."""
    layout = workload.layout
    if layout.cp == 1:
        return {}
    _, ranks, stride = workload.ranks_of("cp")
    found: dict[Phase, float] = {}
    if layout.cp_kind == "ulysses":
        for call in calls(workload, here):
            each = on.links.seconds(call.op, call.bytes, ranks, stride)
            found[call.phase] = found.get(call.phase, 0.0) + each * call.count / workload.accumulation
        return found
    message = on.links.seconds("send", turn_bytes(workload), ranks, stride)
    turns = layout.cp - 1
    forward, backward = (seconds * turns / layout.cp for seconds in on.attention(share))
    for phase in passes(workload):
        hidden, alone = turns * message, 0.0
        if phase == "backward":
            hidden, alone = (2 * turns - 1) * message, message
        beside = backward if phase == "backward" else forward
        found[phase] = here.layers * (alone + hidden - on.stack.overlap * min(hidden, beside))
    return found
