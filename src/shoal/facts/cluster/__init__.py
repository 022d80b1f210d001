"""Cluster: the hardware. Devices of one kind in equal nodes, and the links between them."""

from __future__ import annotations

from shoal.facts.cluster import devices
from shoal.facts.cluster.devices import Count, Device, Hardware, Link, Memory, Positive, Share
from shoal.facts.problem import BadInput, Problem

MOST_DEVICES = 10_000_000


class Cluster(Hardware):
    """Devices of one kind in equal nodes. Link rates are in one direction; the fast link's is per device."""

    name: str  # as the user wrote it
    device: Device
    nodes: Count
    devices_per_node: Count
    fast_domain: Count  # devices that the fast link joins, never more than there are; the last may be smaller
    fast: Link | None  # None: the devices of a node reach one another over device.host_link
    network: Link  # one adapter
    nics: Count  # adapters of one node, which its devices share
    # Of a node's bandwidth, what the fabric carries between different adapters' rails; 1 where no spine is too thin.
    across_rails: Share = 1.0
    # Of one node, which its devices share; None: as in the vendors' reference systems.
    host_memory: Memory | None = None
    host_bandwidth: Positive | None = None  # bytes/s of that memory, as an optimizer on all cores reaches
    nvme: Memory | None = None  # bytes of local disks

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def domain(self) -> int:
        """Devices that reach one another without the network."""
        return max(self.fast_domain, self.devices_per_node)

    @property
    def apart(self) -> int | None:
        """The same if some devices need the network; None if none does."""
        return self.domain if self.domain < self.devices else None

    def __str__(self) -> str:
        """The shortest notation that parses back to this cluster; its name where only that does."""
        device = self.device
        as_catalogued = (
            device == devices.find(device.name)
            and (self.fast, self.network) == (device.fast, device.network)
            and (self.nics, self.across_rails) == (default_nics(device, self.devices_per_node), 1.0)
            and (self.host_memory, self.host_bandwidth, self.nvme) == (None, None, None)
            and self.fast_domain == _domain(device, self.nodes, self.devices_per_node)
        )
        if not as_catalogued:
            return self.name
        if self.devices_per_node == default_per_node(device, self.devices):
            return f"{self.devices}x{device.name}"
        return f"{self.nodes}x{self.devices_per_node}x{device.name}"


def assemble(
    name: str,
    device: Device,
    nodes: int,
    devices_per_node: int,
    fast_domain: int | None = None,
    fast: Link | None = None,
    network: Link | None = None,
    host_memory: int | None = None,
    host_bandwidth: float | None = None,
    nvme: int | None = None,
    nics: int | None = None,
    across_rails: float = 1.0,
) -> Cluster:
    """A cluster with the device's own links and domain wherever none are given."""
    if fast_domain is None and fast is not None and device.fast is None:
        fast_domain = devices_per_node  # a link the catalogue does not know: the usual one, within a node
    elif fast_domain is None:
        fast_domain = _domain(device, nodes, devices_per_node)
    cluster = Cluster(
        name=name,
        device=device,
        nodes=nodes,
        devices_per_node=devices_per_node,
        fast_domain=min(fast_domain, nodes * devices_per_node),
        fast=fast or device.fast,
        network=network or device.network,
        nics=nics or (devices_per_node if network else default_nics(device, devices_per_node)),
        across_rails=across_rails,
        host_memory=host_memory,
        host_bandwidth=host_bandwidth,
        nvme=nvme,
    )
    if problems := _contradictions(cluster):
        raise BadInput(problems)
    return cluster


def default_per_node(device: Device, count: int) -> int:
    """Devices in each node where the user only said how many there are."""
    return min(count, device.devices_per_node or count)


def default_nics(device: Device, devices_per_node: int) -> int:
    """Adapters of a node: as many for each device as in the usual one, and at least one."""
    usual = device.devices_per_node or devices_per_node
    return max(1, round((device.nics or usual) * devices_per_node / usual))


def _domain(device: Device, nodes: int, devices_per_node: int) -> int:
    """How far the fast link reaches: within the node, unless the device is built to reach beyond it."""
    beyond_the_node = device.devices_per_node is not None and device.fast_domain > device.devices_per_node
    return min(device.fast_domain, nodes * devices_per_node if beyond_the_node else devices_per_node)


def _contradictions(cluster: Cluster) -> list[Problem]:
    problems = []
    domain, per_node = cluster.fast_domain, cluster.devices_per_node
    if domain > 1 and cluster.fast is None:
        problems.append(
            Problem(
                f"{cluster.name}: a fast_domain of {domain} but no fast link",
                "add a table [fast] with bandwidth and latency, or set fast_domain = 1",
            )
        )
    if per_node % domain and domain % per_node:
        problems.append(
            Problem(
                f"{cluster.name}: nodes of {per_node} devices across fast-link domains of {domain}",
                f"nodes that divide {domain} or are a multiple of it, or a file with another fast_domain",
            )
        )
    if cluster.devices > MOST_DEVICES:
        problems.append(Problem(f"{cluster.name}: {cluster.devices} devices", f"at most {MOST_DEVICES}"))
    return problems
