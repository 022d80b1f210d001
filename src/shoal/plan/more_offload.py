"""What is offloaded next where a layout does not fit, and what of it is gone from the device then at most."""

from __future__ import annotations

from shoal.facts.layout import Offload
from shoal.facts.ledger import Ledger
from shoal.plan.space import NOTHING, OFFLOADS, Candidate

Offloads = tuple[Offload, ...]


def _beyond(offload: Offloads, lighter: Offloads) -> set[str]:
    """What is offloaded there and not here, or less of it."""
    here = {part.what: part.fraction for part in lighter}
    return {part.what for part in offload if here.get(part.what, 0.0) < part.fraction}


# What is offloaded to a host's memory: of each of these, more where less does not fit, for it is never faster. NVMe is
# asked where that memory has no room.
CHAINS: tuple[tuple[Offloads, ...], ...] = (
    (OFFLOADS[6], OFFLOADS[0]),
    (OFFLOADS[2], OFFLOADS[7]),
    (OFFLOADS[1],),
    (OFFLOADS[3],),
)
HEAVIER: dict[Offloads, tuple[Offloads, ...]] = {
    way: chain[place + 1 :] for chain in CHAINS for place, way in enumerate(chain[:-1])
}
# And of which of them each offloads more.
LIGHTER: dict[Offloads, tuple[Offloads, ...]] = {
    way: (NOTHING, *(one for one in OFFLOADS if one != way and _beyond(one, way) == set()))
    for way in OFFLOADS
}


def removable(candidate: Candidate, lighter: Offloads, memory: Ledger) -> int:
    """Bytes that are gone at most where something is offloaded, of what the same layout holds that offloads less."""
    away = _beyond(candidate.states.offload, lighter)
    gone = 0
    if away & {"optimizer", "params"}:
        gone += memory.optimizer + memory.params
        gone += memory.grads if candidate.split.pp == 1 else 0  # a pipeline's add up on the device
    if "params" in away:
        gone += memory.buffers
    if "activations" in away:
        gone += memory.activations
    return gone
