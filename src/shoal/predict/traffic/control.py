"""Control traffic of every step: two all-reduces of two 8-byte numbers over all ranks.

Before the step, between hosts: how many targets it has, and whether a rank was asked to stop. After the backward pass,
between devices, so that no host waits for its own: the losses and the squares of the gradients. Clipping and the check
for non-finite gradients read that norm and send nothing.
"""

from __future__ import annotations

from shoal.predict.collective_call import CollectiveCall
from shoal.predict.workload import Workload


def calls(workload: Workload) -> tuple[CollectiveCall, ...]:
    if workload.layout.world == 1:
        return ()
    return tuple(CollectiveCall("all_reduce", group, 16, 1, "control") for group in ("control", "everyone"))
