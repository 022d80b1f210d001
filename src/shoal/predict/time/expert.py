"""Time of expert parallelism: what a micro-batch waits for while tokens travel to their experts and back.

All-to-alls end when the busiest rank has received its tokens (``facts/expert_load.py``). Where every token also uses a
shared expert, that one's products are computed meanwhile, forward and backward.

Where experts are on several nodes, a token crosses to each once and is passed on inside it: the one exchange waits for
the other, each over its own links, unless what has come is passed on at once (``Stack.passes_on``). How many nodes a
token reaches is what even routing comes to, within the groups that the router limits it to. Other stacks send each copy
to its rank, over the slow links (``Stack.sends_once``). Some compute one micro-batch while the tokens of another travel
(``Stack.expert_overlap``).
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
    totals: dict[Phase, float] = {}
    for spent in found.values():
        for phase, seconds in spent.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    left = _left(totals, on, here, share)
    return {
        group: {phase: seconds * left[phase] for phase, seconds in spent.items()}
        for group, spent in found.items()
    }


def _left(
    totals: dict[Phase, float], on: CostModel, here: RankParameters, share: LayerShare
) -> dict[Phase, float]:
    """Of each pass's exchanges, the part that nothing hides."""
    layer, total = on.layer(share), sum(totals.values())
    if on.stack.expert_overlap and total:
        hidden = on.stack.expert_overlap * min(total, here.sparse * (layer.forward + layer.backward))
        return dict.fromkeys(totals, 1 - hidden / total)
    forward, backward = on.shared_experts(share)
    return {
        phase: 1
        - on.stack.overlap * min(1.0, here.sparse * (backward if phase == "backward" else forward) / seconds)
        if seconds
        else 1.0
        for phase, seconds in totals.items()
    }
