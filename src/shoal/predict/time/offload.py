"""Offload time: what transfers and a host's update add to a step.

optimizer    gradients leave beside the backward pass of every micro-batch. Once the norm is known the host updates
             block by block, in forward order; new weights return one block behind, and the next step's forward pass
             waits for each block alone
params       weights, frozen ones too, come in beside the forward pass and again beside the backward pass of every
             micro-batch
activations  what is kept for the backward pass leaves beside the forward pass, and comes back beside the backward pass

The two ways of a link are independent. What goes through files takes as long as the slower of link and disk. Rates are
a device's share of its node's (``facts/calibration``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.facts.calibration import NodeRates
from shoal.facts.layout.offload import away_bytes, leaves_early, waiting
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
    seconds = added(how(workload, rates), rates, beside, has, away, update, workload.accumulation)
    return Transfer(seconds, 1 - away.optimizer)


class Ways(NamedTuple):
    """How a layout moves what it offloads. Bytes of a parameter, rates, and whether something happens: 1 or 0."""

    travelling: float  # a gradient on its way
    added: float  # what the host moves to add it up
    updated: float  # and to update
    back: float  # the new weight
    states: float  # what goes through files: nothing, where states rest in memory
    fetches: float  # bytes a second, of weights
    sends: float  # of activations
    returns: float
    whole: float  # ranks update shards of whole weights, and each gathers the others'
    gathered_once: float  # weights are fetched once a step, for all passes
    early: float  # gradients leave in every backward pass


def how(workload: Workload, rates: NodeRates) -> Ways:
    layout = workload.layout
    each = away_bytes(workload.recipe, layout, workload.accumulation, workload.stack)
    shared, on_disk = layout.shards > 1, _on_nvme(workload, "activations")
    return Ways(
        each.travelling,
        each.added,
        each.updated,
        each.back,
        each.states if _on_nvme(workload, "optimizer") else 0.0,
        _slower(rates.link, rates.disk_read, _on_nvme(workload, "params")),
        _slower(rates.link, rates.disk_write, on_disk),
        _slower(rates.link, rates.disk_read, on_disk),
        float(shared and layout.zero < 3),
        float(shared and layout.zero == 3 and layout.pp > 1),
        float(leaves_early(layout)),
    )


def added(
    ways: Ways,
    rates: NodeRates,
    beside: Beside,
    has: Offloadable,
    away: Shares,
    update: Any,
    times: Any,
    most: Callable[[Any, Any], Any] = max,
    least: Callable[[Any, Any], Any] = min,
) -> Any:
    """Seconds of a step that offload adds. A search asks about many layouts at once, in columns: ``most`` and ``least``
    are then those of columns.
    """

    def exposed(transferred: Any, computed: Any) -> Any:
        """What a pass takes longer with a transfer beside it."""
        return most(0.0, transferred - computed) + SLOWED * least(transferred, computed)

    elements, layers = has.updated * away.optimizer, most(1, has.layers)
    leaving = elements * ways.travelling / rates.link
    adding = elements * ways.added / rates.update * (times > 1)
    fetching = has.weights * away.params / ways.fetches
    # Ranks that update shards of whole weights gather each other's on the device, and all of it goes home from there.
    resting = fetching * ways.whole
    fetching = fetching / (1 + ways.gathered_once * (2 * times - 1))
    kept = has.activations * away.activations
    sending, returning = kept / ways.sends, kept / ways.returns

    # The new weights: of what rests elsewhere they are fetched in any case.
    back = most(0.0, elements - has.updated * away.params) * ways.back / rates.link
    through_disk = elements * ways.states * (1 / rates.disk_read + 1 / rates.disk_write)
    ready = most(most(elements * ways.updated / rates.update, through_disk), back) + back / layers
    ready = ready + (away.optimizer == 1.0) * has.embedding * ways.travelling / rates.link

    # Elsewhere gradients leave together, once a step.
    after = resting + (1 - ways.early) * leaving
    beside_backward = most(fetching + returning, ways.early * most(leaving, adding))
    beside_forward = most(fetching, sending)
    waits = times * exposed(beside_backward, beside.backward)
    waits = waits + (times - 1) * exposed(beside_forward, beside.forward) + times * fetching / layers
    # The last block's forward pass comes after its update, and then the head with its loss. What the device updates
    # itself takes its time meanwhile.
    first = beside.blocks * (1 - 1 / layers)
    own = (1 - away.optimizer) * update * (away.optimizer > 0)
    late = most(exposed(most(beside_forward, back), beside.forward), ready - first - own)
    return most(after + waits + most(late, 0.0), away.optimizer * update)


def _on_nvme(workload: Workload, what: str) -> bool:
    part = waiting(workload.layout.offload, what)
    return part is not None and part.nvme


def _slower(link: float, disk: float, on_disk: bool) -> float:
    return min(link, disk) if on_disk else link
