"""Offload time: transfers to the device and back, overlapped with compute.

optimizer    once a step: gradients out, updated weights in; between them a CPU updates, or states pass through a disk
params       every micro-batch: a rank's part of the weights comes in for the forward pass and for the backward pass
activations  every micro-batch: what is kept for the backward pass goes out, and comes back
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.layout import Offload
from shoal.facts.precision import compute_width, state_width
from shoal.predict.workload import Workload

# Bytes/s of a device's share of its machine: memory as a CPU's AdamW uses it, and a local NVMe disk. Measured beside
# one H200 (16 cores: 1.2e9 parameters in 304 ms; disk 2.9 GB/s read, 1.6 GB/s written).
HOST_MEMORY = 110e9
DISK_READ = 2.9e9
DISK_WRITE = 1.6e9
# Of the host's update, the share that hides behind the backward pass: 1.62 against 2.15 times the step, measured.
UPDATE_HIDDEN = 0.5
# What copies that run beside matrix products slow these down by, measured there.
SLOWED = 0.078


class Transfer(NamedTuple):
    """Seconds of a step that offload adds, and whether the device is spared the update."""

    seconds: float
    updates: bool


def transfer(
    workload: Workload, link: float, computed: float, owned: float, kept: float, weights: float
) -> Transfer:
    """``link``: bytes/s to the host. ``computed``: seconds of computation that transfers can hide behind.

    ``owned``: parameters this rank updates; ``kept``: bytes of activations of a step; ``weights``: bytes of parameters
    at rest here.
    """
    if not workload.layout.offload:
        return Transfer(0.0, False)
    recipe, times = workload.recipe, workload.accumulation
    out, back, after, updates = 0.0, 0.0, 0.0, False
    for part in workload.layout.offload:
        if part.what == "optimizer":
            elements = owned * part.fraction
            updates = part.fraction == 1.0
            after += elements * (state_width(recipe) + compute_width(recipe)) / link
            after += 28 * elements / HOST_MEMORY * (1 - UPDATE_HIDDEN)
            if part.nvme:
                after += 12 * elements / DISK_READ + 12 * elements / DISK_WRITE
        elif part.what == "params":
            each = times * weights * part.fraction * _slower(part, link, 1.0) / link
            out, back = out + each, back + each
        else:
            each = kept * part.fraction / link
            out, back = out + each * _slower(part, link, 0.0), back + each * _slower(part, link, 1.0)
    # The first way goes beside the forward pass, a third of the computation, the other beside the backward pass.
    waits = max(0.0, out - computed / 3) + max(0.0, back - computed * 2 / 3)
    return Transfer(after + waits + SLOWED * min(out + back, computed), updates)


def _slower(part: Offload, link: float, read: float) -> float:
    """How many times as long it takes where a disk stands behind the host's memory."""
    if not part.nvme:
        return 1.0
    return max(1.0, link * (read / DISK_READ + (1 - read) / DISK_WRITE))
