"""Offload: which states live off the device and in how many bytes, for both the engine and predictions.

``offload=optimizer`` moves the master weights, the optimizer states and the update itself to the host. The
network's weights stay on the device in the compute precision; gradients move to the host once they are reduced.
``offload=params`` moves the weights too, and with them their update. ``optimizer@nvme`` keeps in files what only
the update reads; ``params@nvme`` keeps the weights there and, unless ``optimizer`` is also given, the optimizer
states, and gradients while they wait for the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.facts.bytes_per_parameter import bytes_per_parameter
from shoal.facts.cluster.stack import SHOAL, Stack
from shoal.facts.layout import Layout, Offload
from shoal.facts.recipe import Recipe

# Blocks in flight at once: one is used or updated while the other is copied.
IN_FLIGHT = 2
# For states on NVMe: the most elements in memory at once (read ahead, being updated, written behind), the largest
# such share of a rank's elements, and the number of stretches that the ring is divided into.
RING, RING_SHARE, STRETCHES = 2**25, 32, 4
# Elements of gradients to accumulate that arrive at once if blocks have fewer on the host: an embedding alone there
# would otherwise arrive by the element.
LANDED_AT_LEAST = 2**20
# The share that the planner counts on of the time between an update and the moment when the next gradients
# overwrite the old ones; states may be written during it.
LATE_SHARE = 0.85
# Staging buffers between files and memory, and the bytes of each, which several threads read or write at once.
STAGES, STAGED = 4, 8 << 20


def offloaded(sizes: Sequence[int], fraction: float) -> int:
    """The index of the first offloaded piece, among a rank's pieces in forward order; all later ones are offloaded
    too.

    The first layers stay on the device, because their weights are needed first and their gradients come last. The
    cut falls between pieces and rounds towards offloading: at least ``fraction`` of the elements is offloaded.
    """
    stays = (1 - fraction) * sum(sizes)
    kept = 0
    for number, size in enumerate(sizes):
        kept += size
        if kept > stays:
            return number
    return len(sizes)


def waiting(parts: Sequence[Offload], what: str) -> Offload | None:
    """How ``what`` is offloaded, or None. A parameter that lives off the device is also updated off the device."""
    if not parts:
        return None
    found: dict[str, Offload] = {part.what: part for part in parts}
    if what != "optimizer" or "params" not in found:
        return found.get(what)
    params, optimizer = found["params"], found.get("optimizer", found["params"])
    if optimizer is not params and params.fraction <= optimizer.fraction:
        return optimizer
    return Offload(what="optimizer", fraction=max(params.fraction, optimizer.fraction), nvme=optimizer.nvme)


def leaves_early(layout: Layout) -> bool:
    """Whether gradients of offloaded parameters move to the host in every backward pass rather than once per step.

    They do where one pass completes them: on one data rank as they are computed, with ``zero=2`` and ``zero=3`` as
    they are reduced. In a pipeline, and with replicas that reduce once per step, they accumulate on the device.
    """
    if layout.pp > 1 or waiting(layout.offload, "optimizer") is None:
        return False
    if layout.shards == 1:
        return layout.dp == 1
    return layout.zero == 3 or (layout.zero == 2 and layout.dp == 1)


def states_may_be_late(recipe: Recipe, layout: Layout) -> bool:
    """Whether an update may return the new weights first and write its states during the next backward pass
    (``train/late_states.py``). Only a single-pass update in memory can: AdamW with fp32 states.

    If parameters are offloaded as well, this holds for those that are.
    """
    states, params = (waiting(layout.offload, what) for what in ("optimizer", "params"))
    if states is None or states.nvme or (params is not None and params.nvme):
        return False
    return recipe.optimizer == "adamw" and recipe.states == "fp32"


def late_elements(window: float, rate: float, elements: float) -> float:
    """How many of ``elements`` have their states written late: what ``rate`` per second allows in ``window``."""
    return min(elements, LATE_SHARE * window * rate)


def returning_elements(elements: float) -> int:
    """New weights in flight in the ring buffer, out of ``elements``, while their gradients are still in use."""
    return min(RING, round(elements) // RING_SHARE)


class OffloadedBytes(NamedTuple):
    """Bytes per parameter whose states are offloaded."""

    master: float  # the master weight, which the host updates
    moments: float  # all other optimizer states
    gradient: float  # while it waits for the update
    back: float  # the new weight on its way to the device; it replaces the gradient
    travelling: float  # the gradient on its way to the host

    @property
    def states(self) -> float:
        """States that only the update reads and writes; with ``@nvme`` they are in files."""
        return self.master + self.moments

    @property
    def updated(self) -> float:
        """Bytes that an update moves: states read and written, gradient read, new weight written."""
        return 2 * self.states + self.gradient + self.back

    @property
    def weight_first(self) -> float:
        """Bytes moved to compute the new weight alone, before its states are written."""
        return self.states + self.gradient + self.back

    @property
    def late(self) -> float:
        """Bytes moved to write its states afterwards."""
        return 2 * self.states + self.gradient

    @property
    def added(self) -> float:
        """Bytes moved to accumulate a gradient that has arrived."""
        return 2 * self.gradient + self.travelling


def away_bytes(recipe: Recipe, layout: Layout, micro_batches: int, stack: Stack = SHOAL) -> OffloadedBytes:
    """Bytes per offloaded parameter. A gradient moves in the precision it was computed in; with ``zero=2`` in that
    of the reduction; at the end of a step in that of its accumulator, or with ``zero=3`` of its weight.

    If each of several micro-batches sends its own, the host accumulates them as wide as the device would.
    """
    hold, early = bytes_per_parameter(recipe, stack), leaves_early(layout)
    travelling = hold.gradient
    if early or (layout.shards > 1 and layout.zero == 3):
        summed = layout.shards > 1 and layout.zero == 2
        # Never narrower than the weight that replaces it.
        travelling = max(hold.reduce, hold.compute) if summed else hold.compute
    return OffloadedBytes(
        master=hold.master or hold.weight,
        moments=hold.moments,
        gradient=travelling if micro_batches == 1 or not early else hold.gradient,
        back=hold.compute,
        travelling=travelling,
    )


class OffDevice(NamedTuple):
    """Bytes that Shoal allocates off the device."""

    host: float
    nvme: float


def staged_bytes(adds_up: bool) -> int:
    """Bytes of the staging buffers between files and memory; doubled where gradients are added to a file's contents."""
    return STAGES * STAGED * (1 + adds_up)


def ring_elements(elements: float, largest: float) -> float:
    """Elements of the in-memory ring for states in files. ``elements``: all such; ``largest``: of the largest
    piece.

    A piece larger than a stretch passes through in several.
    """
    return max(min(RING, elements / RING_SHARE), min(largest, RING // STRETCHES))


def landing_elements(block: float, elements: float) -> float:
    """Elements that arrive on the host at once, to be accumulated there. ``block``: what a transformer block has there
    at most; ``elements``: all that are there.
    """
    return min(elements, max(block, LANDED_AT_LEAST))


def off_device(
    each: OffloadedBytes,
    elements: float,
    block: float,
    part: Offload,
    adds_up: bool,
    largest: float,
    all_filed: bool,
    returning: float = 0.0,
) -> OffDevice:
    """Bytes off the device for ``elements`` offloaded parameters of a rank; at most ``block`` in one transformer
    block and ``largest`` in one piece.

    Gradients to be accumulated on the host arrive in buffers for two blocks, larger pieces in parts; states in
    files pass through a ring. ``all_filed``: gradients do too, staged through buffers of their own
    (``params@nvme``, with its states). ``returning``: parameters whose new weights pass through a ring.
    """
    ring = ring_elements(elements, min(largest, elements))
    if all_filed:
        filed = each.states + each.gradient
        return OffDevice(staged_bytes(adds_up) + ring * filed, elements * filed)
    landing = IN_FLIGHT * landing_elements(block, elements) * each.travelling if adds_up else 0.0
    if part.nvme:
        return OffDevice(elements * each.gradient + landing + ring * each.states, elements * each.states)
    ring = STRETCHES * max(1, returning_elements(returning) // STRETCHES) * each.back if returning else 0.0
    return OffDevice(elements * (each.gradient + each.states) + landing + ring, 0.0)
