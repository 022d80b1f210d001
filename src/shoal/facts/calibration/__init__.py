"""Calibration: the rates that devices and links reach in practice, built in or measured.

Every number belongs to a device kind or a kind of link and has a physical meaning. Those here come with Shoal; what
``shoal profile --calibrate`` measured of a device kind (``facts/calibration/measurements.py``) takes their place,
where it was put in with ``install``. Nothing is put in by itself: a command does so at its start
(``facts/calibration/file.py``), so that a library's or a test's predictions do not depend on what happens to lie in a
home directory. What differs between software stacks is in ``facts/cluster/stack.py``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from shoal.facts.calibration import steps
from shoal.facts.calibration.measurements import Measurements, Seconds
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import Device, Hardware, Positive

Share = Annotated[FiniteFloat, Field(gt=0, le=1)]


class AttentionRates(Hardware):
    """Shares of the dense peak that an attention kernel reaches at head size 128; the work counted causally."""

    forward: Share
    backward: Share


class DeviceRates(Hardware):
    """What kernels reach on one kind of device under sustained load."""

    multiprocessors: int  # tiles of a matrix product that are computed at once
    matmul: Share  # of the dense peak, where every tile is full and the inner length is long
    ramp: Annotated[FiniteFloat, Field(ge=0)]  # inner length that a tile's start and end cost
    memory: Share  # of the memory's bandwidth
    launch: Seconds  # between the end of a kernel and the start of the next
    flash: AttentionRates  # FlashAttention-2 and what SDPA calls flash
    first_flash: AttentionRates  # FlashAttention-1 and its Triton form
    fused: AttentionRates  # the vendor's own, such as cuDNN's
    narrow: Share  # attention at head size 64, of what it reaches at 128
    batched: Share  # of the dense peak, of the batched products of attention that is not fused
    source: str

    def attention(self, kernel: str) -> AttentionRates:
        return {"flash": self.flash, "first_flash": self.first_flash, "fused": self.fused}[kernel]


class LinkRates(Hardware):
    """What collectives reach on one kind of link."""

    share: Share  # of the bandwidth, for large messages
    hop: Seconds  # of latency for every rank that a message passes
    start: Seconds  # before a collective moves its first byte
    # Of the further links that several ranks of a group have out of their domain, how much a collective gets from each.
    rails: Annotated[FiniteFloat, Field(ge=0, le=1)] = 1.0
    bandwidth: Positive | None = None  # bytes/s that were measured, whatever the link's datasheet says
    source: str

    def reached(self, promised: float) -> float:
        """Bytes/s of large messages on a link of which so many are promised."""
        return self.bandwidth or promised * self.share


class NodeRates(Hardware):
    """Bytes/s that a device's host reaches for it: its share of what all devices of a node use."""

    update: Positive  # of memory, as an optimizer on the host's cores moves them
    link: Positive  # between device and memory, each way
    disk_read: Positive
    disk_write: Positive


class Calibration(Hardware):
    """All that a prediction needs to know of a cluster beyond its datasheet."""

    device: DeviceRates
    fast: LinkRates
    network: LinkRates
    host: LinkRates  # between a device and the memory of its machine
    known: bool  # whether the device kind was measured; otherwise its rates are those of a relative
    measured: Measurements | None = None  # kernel by kernel, on a machine at hand
    path: str = ""  # of the file that it came from
    links: str = ""  # of the file that the links' rates came from, where that is another

    def __hash__(self) -> int:  # quick, for caches; equality stays field by field
        return hash((self.device.source, self.fast.source, self.path))

    @property
    def words(self) -> str:
        """Where the rates come from, in one line."""
        links = f"; links measured ({self.links})" if self.links else ""
        if self.measured is None:
            source = self.device.source if self.known else "those of a relative: never measured"
            return f"built in ({source}){links}"
        return f"measured here on {self.measured.date[:10]} ({self.path}){links}"


_FITTED = "fitted on a fifth of the published runs (benchmarks/fit_planner.py)"
_FLASH_AMPERE = AttentionRates(forward=0.60, backward=0.50)
_FLASH_HOPPER = AttentionRates(forward=0.33, backward=0.28)

AMPERE = DeviceRates(
    multiprocessors=108,
    matmul=0.855,
    ramp=23,
    memory=0.85,
    launch=1e-6,
    flash=_FLASH_AMPERE,
    first_flash=AttentionRates(forward=0.349, backward=0.304),
    fused=_FLASH_AMPERE,
    narrow=1.0,
    batched=0.9,
    source=f"{_FITTED}; flash attention from the FlashAttention-2 paper's A100 figures",
)
HOPPER = AMPERE.model_copy(
    update={
        "multiprocessors": 132,
        "matmul": 0.712,
        "flash": _FLASH_HOPPER,
        "first_flash": AttentionRates(forward=0.229, backward=0.199),
        "fused": AttentionRates(forward=0.60, backward=0.48),
        "source": f"{_FITTED}; products agree with an H200's sustained 667 to 690 TFLOP/s; attention measured there",
    }
)
# The same chip held at 500 of its 700 W: products and attention slow down with the clock, memory does not.
HOPPER_500_WATTS = HOPPER.model_copy(
    update={
        "matmul": 0.572,
        "flash": AttentionRates(forward=0.265, backward=0.225),
        "first_flash": AttentionRates(forward=0.184, backward=0.16),
        "fused": AttentionRates(forward=0.482, backward=0.386),
        "source": f"{_FITTED}; attention scaled from HOPPER with the products",
    }
)
CPU = AMPERE.model_copy(
    update={
        "multiprocessors": 1,
        "matmul": 0.7,
        "ramp": 8,
        "memory": 0.7,
        "launch": 5e-6,
        "source": "assumed",
    }
)

DEVICES: dict[str, DeviceRates] = {
    "A100-40GB": AMPERE,
    "A100-80GB": AMPERE,
    "H100": HOPPER,
    "H100-96GB": HOPPER_500_WATTS,
    "H200": HOPPER,
}

FAST = LinkRates(share=0.65, hop=1.8e-5, start=5e-6, source=_FITTED)
NETWORK = LinkRates(share=0.95, hop=4e-5, start=3e-5, rails=0.13, source=_FITTED)
HOST = LinkRates(share=0.87, hop=0.0, start=2e-5, source="H200: pinned copies at 55 of 63 GB/s")

# Of a host, by judgement where it was not measured. An optimizer on 16 cores beside one H200 updated 1.2e9 parameters
# in 304 ms, at 28 bytes each. A node of eight has two sockets of eight channels of DDR5-4800, 614 GB/s; two thirds of
# that is what streaming reaches.
UPDATE = 110e9
UPDATE_MOST = 400e9
# Of one disk for each device, as in the vendors' reference systems; measured there.
DISK_READ = 2.9e9
DISK_WRITE = 1.6e9

_installed: dict[str, Calibration] = {}
_installed_links: dict[str, dict[str, LinkRates | str]] = {}


def install(device: str, measured: Calibration) -> None:
    """From now on predictions for this device kind use these rates."""
    _installed[device] = measured


def install_links(device: str, fast: LinkRates | None, network: LinkRates | None, path: str) -> None:
    """From now on predictions for this device kind use these links' rates, whatever the others' source; None: as is."""
    found = {"fast": fast, "network": network, "links": path}
    _installed_links[device] = {name: value for name, value in found.items() if value is not None}


def forget() -> None:
    """Back to what comes with Shoal."""
    _installed.clear()
    _installed_links.clear()
    steps.forget()


def find(cluster: Cluster) -> Calibration:
    """What is known of a cluster's device kind: measured here, built in, or the rates of its nearest relative."""
    name = cluster.device.name
    found = _installed.get(name) or built_in(cluster.device)
    return found.model_copy(update=_installed_links[name]) if name in _installed_links else found


def node_rates(cluster: Cluster, known: Calibration) -> NodeRates:
    """A device's share of its node. What was measured was measured with one device busy: all of a node."""
    devices, seen = cluster.devices_per_node, known.measured
    update = cluster.host_bandwidth or (seen and seen.host_update) or min(UPDATE * devices, UPDATE_MOST)
    copies = seen.copies if seen else None
    read, write = (copies.disk_read, copies.disk_write) if copies else (None, None)
    return NodeRates(
        update=update / devices,
        # Every copy passes through the host's memory, which is what an update is limited by.
        link=min(known.host.reached(cluster.device.host_link.bandwidth), update / devices),
        disk_read=read / devices if read else DISK_READ,
        disk_write=write / devices if write else DISK_WRITE,
    )


def built_in(device: Device) -> Calibration:
    known = DEVICES.get(device.name)
    rates = known or _relative(device)
    return Calibration(device=rates, fast=FAST, network=NETWORK, host=HOST, known=known is not None)


def _relative(device: Device) -> DeviceRates:
    if device.name == "cpu" or not device.peaks:
        return CPU
    return HOPPER if "fp8" in device.peaks else AMPERE
