"""Collective time from the latency and bandwidth of the links that a group spans.

Ranks fill a cluster in order, so a group is given by its size and the distance in rank between neighbours. All ranks
do the same at the same time: if a node's devices belong to several groups, these communicate simultaneously and share
the node's network adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from shoal.facts.calibration import Calibration
from shoal.facts.cluster import Cluster

# How often a ring moves the whole buffer past every rank, less one rank's part.
ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "all_to_all": 1.0}
MESSAGES = ("send", "receive")
# Without peer access every byte goes through host memory: out of one device, then into the other.
THROUGH_HOST = 0.5


@dataclass
class Links:
    """The links of one cluster, with the rates they reach."""

    cluster: Cluster
    calibration: Calibration
    _times: dict[tuple[str, int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster, rates = self.cluster, self.calibration
        host = cluster.device.host_link.bandwidth * (1.0 if cluster.device.peer_access else THROUGH_HOST)
        # A fast link that joins part of a node, such as a bridge between two cards, serves groups within it; the
        # others of the node communicate over the host link.
        self.domain = cluster.domain
        self.joined = cluster.fast_domain if cluster.fast else 1
        # Per device, to its neighbours; and for all devices of a domain together, out of it.
        self.fast = rates.fast.reached(cluster.fast.bandwidth if cluster.fast else host)
        self.host = rates.fast.reached(host)
        nodes = self.domain / cluster.devices_per_node
        self.network = nodes * rates.network.reached(cluster.nics * cluster.network.bandwidth)
        # One device gets at most one adapter's bandwidth, unless it has several to itself.
        self.one = self.network / max(1.0, min(cluster.nics * nodes, float(self.domain)))

    def seconds(self, op: str, size: int, ranks: int, stride: int) -> float:
        """Seconds of one ``op`` with a buffer of ``size`` bytes, in a group of ``ranks`` that are ``stride`` apart."""
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

    def inside(self, near: int, stride: int) -> float:
        """Bytes/s between ``near`` ranks of a group in one domain."""
        return self.fast if near * stride <= self.joined or self.joined >= self.domain else self.host

    def outward(self, near: int, sending: int, domains: float = 2) -> float:
        """Bytes/s that ``near`` ranks of a group get out of their domain while ``sending`` of its devices send.

        A single rank uses the adapter next to it, and two domains use pairs of adapters. A ring through several ranks
        in each of many domains leaves by another adapter than it entered, so its messages cross the fabric's rails,
        which may carry less (``Cluster.across_rails``).
        """
        cluster, whole = self.cluster, self.network
        if near > 1 and domains > 2:
            whole *= cluster.across_rails
        return min(near * self.one, whole * near / sending)

    def _message(self, size: int, ranks: int, stride: int) -> float:
        """To the next rank of the group. If some neighbours are in another domain, the step waits for those."""
        rates = self.calibration
        if stride * ranks <= self.domain:
            reached = self.inside(ranks, stride) * rates.fast.of("send")
            return rates.fast.start + rates.fast.hop + size / reached
        # As many of a domain's last ranks send out of it as neighbours are apart.
        rate = self.outward(1, min(stride, self.domain)) * rates.network.of("send")
        return rates.network.start + rates.network.hop + size / rate

    def _collective(self, op: str, size: int, ranks: int, stride: int) -> float:
        """A ring through all ranks: inside a domain over fast links, between domains over its devices' share of the
        adapters; the slower of the two decides. Large groups reduce over a tree, whose depth is logarithmic."""
        rates, rounds = self.calibration, ROUNDS.get(op, 1.0)
        near = self.neighbours(ranks, stride)
        within, part = self.inside(near, stride) * rates.fast.of(op), rates.network.of(op)
        inside = rounds * (ranks - 1) / ranks * size / within if near > 1 else 0.0
        seconds = rates.fast.start + rounds * (near - 1) * rates.fast.hop
        if near == ranks:
            return seconds + inside
        far = ranks / near
        if op == "all_to_all":  # every rank has different data for every other
            inside = (near - 1) / ranks * size / within
            outside = (ranks - near) / ranks * size / (part * self.outward(1, self.domain))
        else:
            outside = rounds * (ranks - 1) / ranks * size / (part * self.outward(near, self.domain, far))
        hops = min(far - 1, 2 * log2(far)) if op == "all_reduce" else far - 1
        return seconds + max(inside, outside) + rates.network.start + rounds * hops * rates.network.hop
