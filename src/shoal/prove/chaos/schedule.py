"""Which faults a campaign injects: a function of its seed. Needs no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.observe.flight_recorder import RESTORE, START
from shoal.prove.chaos.fault_kinds import BY_NAME, ENDS_LAUNCHER, IN_RECOVERY, KINDS, FaultKind

# Kinds that can strike a rank which is about to begin.
AT_THE_START = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT")
# How often a rank's fault is followed by another during recovery, besides those that require it.
SECOND = 0.08
# After this many faults it is a launcher's turn, if possible.
LONGEST = 12


@dataclass(frozen=True)
class Fault:
    """``rank`` is a fraction of the world, so that it does not depend on the number of ranks."""

    kind: FaultKind
    point: str
    rank: float
    seed: int
    second: Fault | None = None  # strikes while the run recovers from this one


def schedule(
    seed: int, count: int, worlds: Sequence[int], kinds: Sequence[FaultKind] = KINDS, nodes: int = 1
) -> list[Fault]:
    """``count`` faults, including second ones: every kind occurs before any repeats, in an order given by the seed.

    After each fault that ends the launcher the next of ``worlds`` begins, starting with the first. ``nodes``: how many
    launchers there are, if a world has a rank for each.
    """
    numbers = random.Random(seed)
    bag: list[FaultKind] = []
    seen: set[FaultKind] = set()
    faults: list[Fault] = []
    made, segment, here = 0, 0, 0
    while made < count:
        world = worlds[segment % len(worlds)]
        here_nodes = nodes_for(world, nodes)
        possible = [kind for kind in bag if kind.least_world <= world and kind.least_nodes <= here_nodes]
        if not possible:
            bag += [kind for kind in kinds for _ in range(kind.weight)]
            continue
        # Each kind once before chance decides; and a launcher must not live too long.
        ending = [kind for kind in possible if kind.name in ENDS_LAUNCHER and here >= LONGEST]
        fresh = [kind for kind in possible if kind not in seen]
        kind = numbers.choice(ending or fresh or possible)
        bag.remove(kind)
        seen.add(kind)
        fault = _fault(kind, numbers, room=count - made)
        if fault is None:
            continue
        faults.append(fault)
        made += 1 + (fault.second is not None)
        ended = kind.name in ENDS_LAUNCHER
        segment, here = segment + ended, 0 if ended else here + 1
    return faults


def nodes_for(world: int, nodes: int) -> int:
    """How many of ``nodes`` a world is put on."""
    return nodes if world % nodes == 0 else 1


def _fault(kind: FaultKind, numbers: random.Random, room: int) -> Fault | None:
    point, rank, seed = numbers.choice(kind.points), numbers.random(), numbers.getrandbits(32)
    if kind.target == "checkpoint":
        # Damage is found only when the run recovers from something else, so that comes first.
        if room < 2:
            return None
        second = Fault(kind, RESTORE, 0.0, seed)
        first = BY_NAME["SIGKILL"]
        return Fault(first, numbers.choice(first.points), rank, seed, second)
    if kind.name in AT_THE_START and room > 1 and numbers.random() < SECOND * len(AT_THE_START):
        again = BY_NAME[numbers.choice(AT_THE_START)]
        second = Fault(again, numbers.choice((START, *IN_RECOVERY)), numbers.random(), seed + 1)
        return Fault(kind, point, rank, seed, second)
    return Fault(kind, point, rank, seed)
