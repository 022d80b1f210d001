"""Stragglers: ranks that are slower than their peers step after step.

All ranks' steps take equally long, because they wait for each other. What differs is how much of a step a rank does not
wait. From time to time the ranks compare their typical busy time, and one far above its peers is named.

On a GPU the host does not wait for collectives, the device does. So only the hosts' time is compared there: input,
Python, a machine busy with something else. A slow device goes unnoticed.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from statistics import median, median_low
from typing import Any

import torch

from shoal.facts.layout.ranks import coordinates
from shoal.observe.waits import Waits, timed_waits
from shoal.parallel.mesh import Mesh

# Steps over which a rank's typical time is taken, and between two comparisons.
WINDOW = 20
# A rank must be slow in this many consecutive comparisons: on a shared machine any rank is slow now and then.
IN_A_ROW = 3
# Of a step: smaller differences are noise of clocks and schedulers.
LEAST_SECONDS = 0.001
# A rank that stays slow is named again after this.
AGAIN_SECONDS = 3600.0


class Stragglers:
    """One rank's part. Use it as a context around the loop; ``begin`` and ``end`` enclose each step."""

    def __init__(self, mesh: Mesh, factor: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """``factor``: a rank this many times slower than its peers is named; 0 disables it."""
        self.mesh, self.factor, self.clock = mesh, factor, clock
        # Pipeline stages have different work by design.
        self.peers = [coordinates(rank, mesh.layout)["pp"] for rank in range(mesh.world)]
        self.waits = Waits()
        self._busy: deque[float] = deque(maxlen=WINDOW)
        self._started = self._waited = 0.0
        self._slow: Counter[int] = Counter()
        self._named: dict[int, float] = {}
        self._patches = ExitStack()

    def __enter__(self) -> Stragglers:
        if self.factor and self.mesh.world > 1:
            self._patches.enter_context(timed_waits(self.waits))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def begin(self) -> None:
        """Call when the previous step, its evaluation and its commit are over."""
        self._started, self._waited = self.clock(), self.waits.seconds

    def end(self) -> None:
        """Call when a step's work is done."""
        self._busy.append(self.clock() - self._started - (self.waits.seconds - self._waited))

    def compare(self, step: int) -> dict[str, Any] | None:
        """Call after each step, on every rank; returns on the first rank a row of faults.jsonl if there is news."""
        if not self.factor or self.mesh.world == 1 or step % WINDOW or len(self._busy) < WINDOW:
            return None
        busy = self.mesh.hosts.all_gather_values(torch.tensor([median(self._busy)], dtype=torch.float64))
        return self._news(step, busy.tolist()) if self.mesh.rank == 0 else None

    def _news(self, step: int, busy: Sequence[float]) -> dict[str, Any] | None:
        found = slower(busy, self.peers, self.factor)
        self._slow = Counter({rank: self._slow[rank] + 1 for rank in found})
        slow = {rank: usual for rank, usual in found.items() if self._slow[rank] >= IN_A_ROW}
        now = self.clock()
        if all(rank in self._named and now - self._named[rank] < AGAIN_SECONDS for rank in slow):
            return None
        self._named.update(dict.fromkeys(slow, now))
        told = [
            f"rank {rank} takes {1000 * busy[rank]:.1f} ms per step, its peers {1000 * usual:.1f}"
            for rank, usual in slow.items()
        ]
        return {
            "kind": "straggler",
            "step": step,
            "ranks": list(slow),
            "seconds": [busy[rank] for rank in slow],
            "peers_seconds": list(slow.values()),
            "action": "; ".join(told),
        }


def slower(busy: Sequence[float], peers: Sequence[Hashable], factor: float) -> dict[int, float]:
    """Ranks that take ``factor`` times the typical time of ranks with the same value in ``peers``, and their time.

    The slowest comes first. Of two peers the faster one sets the measure.
    """
    groups: dict[Hashable, list[int]] = {}
    for rank, peer in enumerate(peers):
        groups.setdefault(peer, []).append(rank)
    usual = {peer: median_low(busy[rank] for rank in ranks) for peer, ranks in groups.items()}
    limits = {peer: max(factor * time, time + LEAST_SECONDS) for peer, time in usual.items()}
    found = [rank for rank, peer in enumerate(peers) if busy[rank] > limits[peer]]
    found.sort(key=lambda rank: busy[rank] / max(usual[peers[rank]], LEAST_SECONDS), reverse=True)
    return {rank: usual[peers[rank]] for rank in found}
