"""Offload time: what transfers and a host's update add to a step.

optimizer    gradients leave beside the backward pass of every micro-batch. Once the norm is known the host updates
             block by block, in forward order; new weights return one block behind, and the next step's forward pass
             waits for each block alone. Of as many as there is time for, states are written later, beside the backward
             pass
params       weights, frozen ones too, come in beside the forward pass and again beside the backward pass of every
             micro-batch
activations  what is kept for the backward pass leaves beside the forward pass, and comes back beside the backward pass

The two ways of a link are independent. What goes through files takes as long as the slower of link and disk. Rates are
a device's share of its node's (``facts/calibration``).
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.calibration import NodeRates
from shoal.facts.layout.offload import away_bytes, late_elements, leaves_early, states_may_be_late, waiting
from shoal.predict.workload import Workload

# What copies that run beside matrix products slow these down by, measured on an H200.
SLOWED = 0.078


class Beside(NamedTuple):
    """Seconds that one micro-batch computes, which transfers hide behind."""

    forward: float
    backward: float  # with what is computed again
    blocks: float  # of the forward pass, what comes before the head and its loss


class Offloadable(NamedTuple):
    """What a rank has."""

    updated: float  # parameters that it updates
    embedding: float  # of these, those whose gradients come last and which are updated first
    weights: float  # bytes of parameters at rest, frozen ones too
    activations: float  # bytes that it keeps of one micro-batch
    layers: int


class Shares(NamedTuple):
    """Of each, what is offloaded."""

    optimizer: float
    params: float
    activations: float


class Transfer(NamedTuple):
    """Seconds of a step that offload adds, and the share of the update that is left to the device."""

    seconds: float
    stays: float


def transfer(
    workload: Workload, rates: NodeRates, beside: Beside, has: Offloadable, away: Shares, update: float
) -> Transfer:
    """``update``: seconds that the device takes to update all that the rank updates.

    A step never gets faster: where a host's update hides entirely, what it spares the device is not counted as gained.
    That has not been measured, and the search relies on it (``plan/best_first.py``).
    """
    layout, times = workload.layout, workload.accumulation
    each = away_bytes(workload.recipe, layout, times, workload.stack)
    elements, layers = has.updated * away.optimizer, max(1, has.layers)
    in_files = _on_nvme(workload, "params")
    all_filed = in_files and _on_nvme(workload, "optimizer")
    leaving = elements * each.travelling / rates.link
    adding = elements * each.added / rates.update if times > 1 else 0.0
    if all_filed:
        # What adds up is read and written for every micro-batch.
        adds_up = times > 1 and leaves_early(layout)
        leaving = max(leaving, elements * each.gradient / rates.disk_write)
        leaving += elements * each.gradient / rates.disk_read if adds_up else 0.0
    fetching = has.weights * away.params / _slower(rates.link, rates.disk_read, in_files)
    # Ranks that update shards of whole weights gather each other's on the device, and all of it goes home from there.
    resting = fetching if layout.shards > 1 and layout.zero < 3 else 0.0
    if in_files and resting:
        resting = has.weights * away.params / min(rates.link, rates.disk_write)
    if layout.shards > 1 and layout.zero == 3 and layout.pp > 1:
        fetching /= 2 * times  # gathered once a step, for all passes
    kept, on_disk = has.activations * away.activations, _on_nvme(workload, "activations")
    sending = kept / _slower(rates.link, rates.disk_write, on_disk)
    returning = kept / _slower(rates.link, rates.disk_read, on_disk)

    # The new weights: of what rests elsewhere they are fetched in any case.
    back = max(0.0, elements - has.updated * away.params) * each.back / rates.link
    through_disk = 0.0
    if _on_nvme(workload, "optimizer"):
        through_disk = elements * each.states * (1 / rates.disk_read + 1 / rates.disk_write)
    # Gradients are read as they are used, new weights written as they are made.
    if all_filed:
        through_disk += elements * each.gradient / rates.disk_read
    if in_files:
        through_disk += has.updated * away.params * each.back / rates.disk_write
    # The last block's forward pass comes after its update, and then the head with its loss.
    first = beside.blocks * (1 - 1 / layers)
    # Until the first micro-batch's gradients take the place of those that are read for the states.
    window = beside.forward - first + beside.backward
    late = 0.0
    if states_may_be_late(workload.recipe, layout) and workload.cluster.device.name != "cpu":
        may_be = has.updated * away.params if away.params else elements
        late = late_elements(window, rates.update / each.late, may_be)
    moved = elements * each.updated - late * (each.updated - each.weight_first)
    ready = max(moved / rates.update, through_disk, back) + back / layers
    if away.optimizer == 1.0:
        ready += has.embedding * each.travelling / rates.link

    # Elsewhere gradients leave together, once a step.
    at_once = times if leaves_early(layout) else 0
    after = resting + (0.0 if at_once else leaving)
    beside_backward = max(fetching + returning, max(leaving, adding) if at_once else 0.0)
    beside_forward = max(fetching, sending)
    waits = times * _exposed(beside_backward, beside.backward)
    waits += (times - 1) * _exposed(beside_forward, beside.forward) + times * fetching / layers
    # What the device updates itself takes its time meanwhile.
    own = (1 - away.optimizer) * update if away.optimizer else 0.0
    waits += max(_exposed(max(beside_forward, back), beside.forward), ready - first - own, 0.0)
    # Nor does it get faster than with the activations alone.
    alone = times * (_exposed(returning, beside.backward) + _exposed(sending, beside.forward))
    return Transfer(max(after + waits, away.optimizer * update + alone), 1 - away.optimizer)


def _exposed(transferred: float, computed: float) -> float:
    """What a pass takes longer with a transfer beside it."""
    return max(0.0, transferred - computed) + SLOWED * min(transferred, computed)


def _on_nvme(workload: Workload, what: str) -> bool:
    part = waiting(workload.layout.offload, what)
    return part is not None and part.nvme


def _slower(link: float, disk: float, on_disk: bool) -> float:
    return min(link, disk) if on_disk else link
