"""What to offload next when a layout does not fit, and how many device bytes that can free at most."""

from __future__ import annotations

from shoal.facts.layout import Offload
from shoal.facts.ledger import Ledger
from shoal.plan.space import NOTHING, OFFLOADS, Candidate

Offloads = tuple[Offload, ...]


def _beyond(offload: Offloads, lighter: Offloads) -> set[str]:
    """What the first offloads and the second does not, or less of."""
    here = {part.what: part.fraction for part in lighter}
    return {part.what for part in offload if here.get(part.what, 0.0) < part.fraction}


# Chains of offload to host memory: take the next only if the previous does not fit, because it is never faster. NVMe
# is tried if host memory is full.
CHAINS: tuple[tuple[Offloads, ...], ...] = (
    (OFFLOADS[6], OFFLOADS[0]),
    (OFFLOADS[2], OFFLOADS[7]),
    (OFFLOADS[1],),
    (OFFLOADS[3],),
)
HEAVIER: dict[Offloads, tuple[Offloads, ...]] = {
    way: chain[place + 1 :] for chain in CHAINS for place, way in enumerate(chain[:-1])
}
# For each offload, those that offload less.
LIGHTER: dict[Offloads, tuple[Offloads, ...]] = {
    way: (NOTHING, *(one for one in OFFLOADS if one != way and _beyond(one, way) == set()))
    for way in OFFLOADS
}


def removable(candidate: Candidate, lighter: Offloads, memory: Ledger) -> int:
    """An upper bound on the bytes freed by more offload, from the ledger of the same layout with less."""
    away = _beyond(candidate.states.offload, lighter)
    gone = 0
    if away & {"optimizer", "params"}:
        gone += memory.optimizer + memory.params
        gone += memory.grads if candidate.split.pp == 1 else 0  # pipelines accumulate on the device
    if "params" in away:
        gone += memory.buffers
    if "activations" in away:
        gone += memory.activations
    return gone
