"""Offload time: what transfers and the host's update add to a step.

optimizer    gradients leave during the backward pass of every micro-batch. Once the norm is known the host updates
             block by block, in forward order; new weights return one block behind, and the next step's forward pass
             waits for each block alone. As many states as there is time for are written later, during the backward
             pass
params       weights, frozen ones too, are fetched during the forward pass and again during the backward pass of every
             micro-batch
activations  saved activations leave during the forward pass, and are fetched during the backward pass

A link's two directions are independent. Transfers to or from files take as long as the slower of link and disk. Rates
are a device's share of its node's (``facts/calibration``).
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.calibration import NodeRates
from shoal.facts.layout.offload import away_bytes, late_elements, leaves_early, states_may_be_late, waiting
from shoal.predict.workload import Workload

# Slowdown of matrix products by copies that overlap them, measured on an H200.
SLOWED = 0.078


class OverlappableCompute(NamedTuple):
    """Compute seconds of one micro-batch, which transfers can hide behind."""

    forward: float
    backward: float  # with recomputation
    blocks: float  # the forward pass up to the head and its loss


class Offloadable(NamedTuple):
    """What a rank has that can be offloaded."""

    updated: float  # parameters that it updates
    embedding: float  # of these, the embedding's: their gradients come last and they are updated first
    weights: float  # bytes of stored parameters, frozen ones too
    activations: float  # bytes that it saves per micro-batch
    layers: int


class Shares(NamedTuple):
    """The offloaded share of each."""

    optimizer: float
    params: float
    activations: float


class Transfer(NamedTuple):
    """Seconds per step that offload adds, and the share of the update that stays on the device."""

    seconds: float
    stays: float


def transfer(
    workload: Workload,
    rates: NodeRates,
    beside: OverlappableCompute,
    has: Offloadable,
    away: Shares,
    update: float,
) -> Transfer:
    """``update``: seconds in which the device would update all that the rank updates.

    Offload never makes a step faster: even if the host's update hides entirely, the device time it saves is not
    counted. That has not been measured, and the search relies on it (``plan/best_first.py``).
    """
    layout, times = workload.layout, workload.accumulation
    each = away_bytes(workload.recipe, layout, times, workload.stack)
    elements, layers = has.updated * away.optimizer, max(1, has.layers)
    in_files = _on_nvme(workload, "params")
    all_filed = in_files and _on_nvme(workload, "optimizer")
    leaving = elements * each.travelling / rates.link
    adding = elements * each.added / rates.update if times > 1 else 0.0
    if all_filed:
        # Accumulation in files reads and writes for every micro-batch.
        adds_up = times > 1 and leaves_early(layout)
        leaving = max(leaving, elements * each.gradient / rates.disk_write)
        leaving += elements * each.gradient / rates.disk_read if adds_up else 0.0
    fetching = has.weights * away.params / _slower(rates.link, rates.disk_read, in_files)
    # Ranks that update shards all-gather whole weights on the device, and all of these go back to the host.
    resting = fetching if layout.shards > 1 and layout.zero < 3 else 0.0
    if in_files and resting:
        resting = has.weights * away.params / min(rates.link, rates.disk_write)
    if layout.shards > 1 and layout.zero == 3 and layout.pp > 1:
        fetching /= 2 * times  # gathered once per step, for all passes
    kept, on_disk = has.activations * away.activations, _on_nvme(workload, "activations")
    sending = kept / _slower(rates.link, rates.disk_write, on_disk)
    returning = kept / _slower(rates.link, rates.disk_read, on_disk)

    # New weights to return; those of offloaded parameters are fetched in any case.
    back = max(0.0, elements - has.updated * away.params) * each.back / rates.link
    # States are read ahead of the cores and written behind them, at the same time.
    read = written = elements * each.states if _on_nvme(workload, "optimizer") else 0.0
    # Gradients are read as they are used, new weights written as they are computed.
    if all_filed:
        read += elements * each.gradient
    if in_files:
        written += has.updated * away.params * each.back
    through_disk = rates.disk_seconds(read, written)
    # The last block's forward pass comes after its update, and then the head with its loss.
    first = beside.blocks * (1 - 1 / layers)
    # The time until the first micro-batch's gradients overwrite those that the states still need.
    window = beside.forward - first + beside.backward
    late = 0.0
    if states_may_be_late(workload.recipe, layout) and workload.cluster.device.name != "cpu":
        may_be = has.updated * away.params if away.params else elements
        late = late_elements(window, rates.update / each.late, may_be)
    moved = elements * each.updated - late * (each.updated - each.weight_first)
    ready = max(moved / rates.update, through_disk, back) + back / layers
    if away.optimizer == 1.0:
        ready += has.embedding * each.travelling / rates.link

    # Otherwise gradients leave together, once per step.
    at_once = times if leaves_early(layout) else 0
    after = resting + (0.0 if at_once else leaving)
    beside_backward = max(fetching + returning, max(leaving, adding) if at_once else 0.0)
    beside_forward = max(fetching, sending)
    waits = times * _exposed(beside_backward, beside.backward)
    waits += (times - 1) * _exposed(beside_forward, beside.forward) + times * fetching / layers
    # The device's own part of the update runs meanwhile.
    own = (1 - away.optimizer) * update if away.optimizer else 0.0
    waits += max(_exposed(max(beside_forward, back), beside.forward), ready - first - own, 0.0)
    # Nor is it faster than with offloaded activations alone.
    alone = times * (_exposed(returning, beside.backward) + _exposed(sending, beside.forward))
    return Transfer(max(after + waits, away.optimizer * update + alone), 1 - away.optimizer)


def _exposed(transferred: float, computed: float) -> float:
    """Time that an overlapping transfer adds to a pass."""
    return max(0.0, transferred - computed) + SLOWED * min(transferred, computed)


def _on_nvme(workload: Workload, what: str) -> bool:
    part = waiting(workload.layout.offload, what)
    return part is not None and part.nvme


def _slower(link: float, disk: float, on_disk: bool) -> float:
    return min(link, disk) if on_disk else link
