"""Control traffic of every step: two all-reduces of a few 8-byte numbers over all ranks.

Before the step, between hosts: how many targets it has, and whether a rank was asked to stop. After the backward pass,
between devices, so that no host waits for its own: losses, what they report beside themselves, and squares of the
gradients; of a model with experts, for each of its layers that has some, also how many tokens each was sent, and the
router's two losses. Clipping and the check for non-finite gradients read that norm and send nothing.
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
