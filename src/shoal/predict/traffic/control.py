"""Control traffic of every step: two all-reduces of a few 8-byte numbers over all ranks.

Before the step, between hosts: its number of targets, and whether a rank was asked to stop. After the backward pass,
between devices so that no host waits for its device: losses, values reported with them, and squared gradient norms;
for a model with experts also tokens per expert in each expert layer, and the router's two losses. Clipping and the
check for non-finite gradients use that norm and send nothing.
"""

from __future__ import annotations

from shoal.facts.model import Model
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.workload import Workload


def calls(workload: Workload) -> tuple[CollectiveCall, ...]:
    if workload.layout.world == 1:
        return ()
    measures = len(workload.recipe.loss_facts.measures)
    sizes = {"control": 16, "everyone": 16 + 8 * (measures + _routed(workload.model))}
    return tuple(CollectiveCall("all_reduce", group, size, 1, "control") for group, size in sizes.items())


def _routed(model: Model) -> int:
    if model.experts is None:
        return 0
    return sum(map(model.has_experts, range(model.layers))) * (model.experts.count + 2)
