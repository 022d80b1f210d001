"""Collective time from latency and bandwidth of the links that a group spans.

Ranks fill a cluster in order, so a group is given by its size and by how far apart in rank two neighbours in it are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from shoal.facts.calibration import Calibration
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import Link

# How often a ring moves the buffer past every rank, less one rank's part.
ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "all_to_all": 1.0}
MESSAGES = ("send", "receive")


@dataclass
class Links:
    """The links of one cluster with what they reach."""

    cluster: Cluster
    calibration: Calibration
    _times: dict[tuple[str, int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster, rates = self.cluster, self.calibration
        inside: Link = cluster.fast or cluster.device.host_link
        self.domain = cluster.fast_domain if cluster.fast else cluster.devices_per_node
        self.fast = rates.fast.reached(inside.bandwidth)
        self.network = rates.network.reached(cluster.network.bandwidth)

    def seconds(self, op: str, size: int, ranks: int, stride: int) -> float:
        """One call of ``op`` with a buffer of ``size`` bytes, in a group of ``ranks`` that are ``stride`` apart."""
        if ranks <= 1:
            return 0.0
        key = op, size, ranks, stride
        known = self._times.get(key)
        if known is None:
            known = self._times[key] = (
                self._message(size, ranks, stride)
                if op in MESSAGES
                else self._collective(op, size, ranks, stride)
            )
        return known

    def neighbours(self, ranks: int, stride: int) -> int:
        """How many ranks of the group share a fast-link domain."""
        return max(1, min(ranks, self.domain // stride if stride <= self.domain else 1))

    def _message(self, size: int, ranks: int, stride: int) -> float:
        """To the next rank of the group. Where some neighbours are in another domain, the step waits for those."""
        rates = self.calibration
        if stride * ranks <= self.domain:
            return rates.fast.start + rates.fast.hop + size / self.fast
        return rates.network.start + rates.network.hop + size / self.network

    def _collective(self, op: str, size: int, ranks: int, stride: int) -> float:
        """Inside a domain a ring. Across domains the ranks of one send side by side, each over its own network link;
        whichever of the two is slower decides. Large groups sum over a tree, whose depth is a logarithm."""
        rates, rounds = self.calibration, ROUNDS.get(op, 1.0)
        near = self.neighbours(ranks, stride)
        inside = rounds * (ranks - 1) / ranks * size / self.fast
        seconds = rates.fast.start + rounds * (near - 1) * rates.fast.hop
        if near == ranks:
            return seconds + inside
        far = ranks / near
        if (
            op == "all_to_all"
        ):  # every rank has its own words for every other, and its own link to send them on
            inside = (near - 1) / ranks * size / self.fast
            outside = (ranks - near) / ranks * size / self.network
        else:
            together = self.network * (1 + (near - 1) * rates.network.rails)
            outside = rounds * (far - 1) / far * size / together
        hops = min(far - 1, 2 * log2(far)) if op == "all_reduce" else far - 1
        return seconds + max(inside, outside) + rates.network.start + rounds * hops * rates.network.hop
