"""What waits off the device, and in how many bytes: decided once, for the engine and for predictions.

``offload=optimizer`` gives the host the master copies, the optimizer's states and the update. The network's weights
stay on the device in the compute precision; gradients leave it as they are summed. ``offload=params`` sends the
weights away as well, and with them their update. ``optimizer@nvme`` keeps what only an update reads in files;
``params@nvme`` keeps weights there, and unless it is written with ``optimizer`` the states, and gradients while they
wait for the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.facts.bytes_per_parameter import bytes_per_parameter
from shoal.facts.cluster.stack import SHOAL, Stack
from shoal.facts.layout import Layout, Offload
from shoal.facts.recipe import Recipe

# Blocks that are on their way at once: one is used or updated while the other travels.
IN_FLIGHT = 2
# Elements whose states are in memory at once where they rest in files, at most: read ahead, updated, written behind.
# And the share of a rank's that are, at most, in stretches of a quarter of that.
RING, RING_SHARE, STRETCHES = 2**25, 32, 4
# Of the time that an update's states have until the next gradients take their gradients' place, what is planned with.
LATE_SHARE = 0.85
# Buffers between files and other memory, and bytes of each: what several threads read or write at once.
STAGES, STAGED = 4, 8 << 20


def offloaded(sizes: Sequence[int], fraction: float) -> int:
    """The number of the first offloaded piece, of a rank's pieces in forward order; from there on all are.

    What comes first stays: its weights are needed first, and its gradients come last. The cut is between pieces, and
    never leaves more on the device than was asked for: at least ``fraction`` of the elements is offloaded.
    """
    stays = (1 - fraction) * sum(sizes)
    kept = 0
    for number, size in enumerate(sizes):
        kept += size
        if kept > stays:
            return number
    return len(sizes)


def waiting(parts: Sequence[Offload], what: str) -> Offload | None:
    """How much of ``what`` is offloaded, and where to. A parameter that is away is updated away."""
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
    """Whether gradients of offloaded parameters leave the device in every backward pass, and not once a step.

    They do where a pass completes them: with one data rank as they are computed, with ``zero=3`` and ``zero=2`` as they
    are summed. In a pipeline, and where replicas sum once a step, they add up on the device.
    """
    if layout.pp > 1 or waiting(layout.offload, "optimizer") is None:
        return False
    if layout.shards == 1:
        return layout.dp == 1
    return layout.zero == 3 or (layout.zero == 2 and layout.dp == 1)


def states_may_be_late(recipe: Recipe, layout: Layout) -> bool:
    """Whether an update may give the device its new weights first, and write its states beside the next backward pass
    (``train/late_states.py``). It does in one pass over memory: AdamW's, with states as wide as they are computed.

    Where parameters rest with the host as well, of those that do."""
    states, params = (waiting(layout.offload, what) for what in ("optimizer", "params"))
    if states is None or states.nvme or (params is not None and params.nvme):
        return False
    return recipe.optimizer == "adamw" and recipe.states == "fp32"


def late_elements(window: float, rate: float, elements: float) -> float:
    """How many elements' states are late, of those that may be: no more than ``rate`` a second have time for."""
    return min(elements, LATE_SHARE * window * rate)


def returning_elements(elements: float) -> int:
    """New weights that pass through a ring while their gradients wait: of so many, those that are there at once."""
    return min(RING, round(elements) // RING_SHARE)


class AwayBytes(NamedTuple):
    """Bytes of a parameter whose states are offloaded."""

    master: float  # the copy that the host updates
    moments: float  # all other states of the optimizer
    gradient: float  # as it waits for the update
    back: float  # the new weight, as it returns, in the gradient's place
    travelling: float  # the gradient on its way

    @property
    def states(self) -> float:
        """What only the update reads and writes: with ``@nvme`` it is in files."""
        return self.master + self.moments

    @property
    def updated(self) -> float:
        """What an update moves: states are read and written, the gradient is read, the new weight written."""
        return 2 * self.states + self.gradient + self.back

    @property
    def weight_first(self) -> float:
        """What its new weight alone takes, before its states are written."""
        return self.states + self.gradient + self.back

    @property
    def late(self) -> float:
        """What its states take then."""
        return 2 * self.states + self.gradient

    @property
    def added(self) -> float:
        """What it moves to add up a gradient that has arrived."""
        return 2 * self.gradient + self.travelling


def away_bytes(recipe: Recipe, layout: Layout, micro_batches: int, stack: Stack = SHOAL) -> AwayBytes:
    """A gradient leaves as it was computed, with ``zero=2`` as it was summed, and at the end of a step as it added up,
    with ``zero=3`` as its weight is.

    Where every one of several micro-batches sends its own, they are added up on the host, as wide as on the device.
    """
    hold, early = bytes_per_parameter(recipe, stack), leaves_early(layout)
    travelling = hold.gradient
    if early or (layout.shards > 1 and layout.zero == 3):
        summed = layout.shards > 1 and layout.zero == 2
        # Never narrower than the weight that will take its place.
        travelling = max(hold.reduce, hold.compute) if summed else hold.compute
    return AwayBytes(
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
    """Between files and other memory; as much again where something is added to what is in a file."""
    return STAGES * STAGED * (1 + adds_up)


def ring_elements(elements: float, largest: float) -> float:
    """Of so many elements whose states rest in files, those that are in memory at once. ``largest``: of the pieces.

    A larger one than a stretch passes in several.
    """
    return max(min(RING, elements / RING_SHARE), min(largest, RING // STRETCHES))


def off_device(
    each: AwayBytes,
    elements: float,
    block: float,
    part: Offload,
    adds_up: bool,
    largest: float,
    all_filed: bool,
    returning: float = 0.0,
) -> OffDevice:
    """Of so many offloaded parameters of a rank, of which a block has at most ``block``, a piece ``largest``.

    Gradients that are yet to be added up where they rest pass through buffers for two blocks, larger pieces in parts;
    states on their way from a file and back through a ring. ``all_filed``: so do gradients, which came there through
    buffers of their own (``params@nvme``, and states with it). ``returning``: of the parameters those whose new weights
    pass through a ring.
    """
    ring = ring_elements(elements, min(largest, elements))
    if all_filed:
        filed = each.states + each.gradient
        return OffDevice(staged_bytes(adds_up) + ring * filed, elements * filed)
    landing = IN_FLIGHT * min(block, elements) * each.travelling if adds_up else 0.0
    if part.nvme:
        return OffDevice(elements * each.gradient + landing + ring * each.states, elements * each.states)
    ring = STRETCHES * max(1, returning_elements(returning) // STRETCHES) * each.back if returning else 0.0
    return OffDevice(elements * (each.gradient + each.states) + landing + ring, 0.0)
