"""Calibration: the rates that devices and links reach in practice, built in or measured.

Every number belongs to a device kind or link kind and has a physical meaning. The built-in ones are here; rates that
``shoal profile --calibrate`` measured for a device kind (``facts/calibration/measurements.py``) replace them once
installed with ``install``. Nothing is installed implicitly: a command does so at its start
(``facts/calibration/file.py``), so that a library's or a test's predictions do not depend on files in a home
directory. Differences between software stacks are in ``facts/cluster/stack.py``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat, model_validator

from shoal.facts.calibration import steps
from shoal.facts.calibration.measurements import Measurements, Seconds
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import Device, Hardware, Positive, Share


class AttentionRates(Hardware):
    """Shares of the dense peak that an attention kernel reaches at head size 128, counting causal FLOPs."""

    forward: Share
    backward: Share

    def scaled(self, ahead: float, back: float) -> AttentionRates:
        return AttentionRates(forward=min(1.0, self.forward * ahead), backward=min(1.0, self.backward * back))


class DeviceRates(Hardware):
    """What kernels reach on one kind of device under sustained load."""

    multiprocessors: int  # which compute one tile of a matrix product each at a time
    matmul: Share  # of the dense peak, with full tiles and a long inner dimension
    # The share of that which remains when all other kernels are fused and nothing idles between products. Fitted on
    # unfused software, the product rate absorbs what the other terms leave out.
    sustained: Share = 1.0
    ramp: Annotated[FiniteFloat, Field(ge=0)]  # a tile's start and end cost, as inner length
    memory: Share  # of the memory bandwidth
    launch: Seconds  # between the end of a kernel and the start of the next
    flash: AttentionRates  # FlashAttention-2, and SDPA's flash backend
    first_flash: AttentionRates  # FlashAttention-1, and its Triton version
    fused: AttentionRates  # the vendor's own, such as cuDNN's
    narrow: Share  # attention at head size 64 relative to 128
    batched: Share  # of the dense peak, for the batched products of unfused attention
    # Devices of a kind differ in speed: the standard deviation as a share. None was seen with a fixed clock; under a
    # power limit it differs from chip to chip.
    spread: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    source: str

    def flash_beside(self, fused: AttentionRates) -> AttentionRates:
        """Flash rates for windows and documents if the vendor's kernel was measured: the same ratio as here."""
        return fused.scaled(
            self.flash.forward / self.fused.forward, self.flash.backward / self.fused.backward
        )

    def attention(self, kernel: str) -> AttentionRates:
        return {"flash": self.flash, "first_flash": self.first_flash, "fused": self.fused}[kernel]


class LinkRates(Hardware):
    """What collectives reach on one kind of link."""

    share: Share  # of the bandwidth, for large messages
    hop: Seconds  # latency for every rank that a message passes
    start: Seconds  # before a collective moves its first byte
    # Measured bytes/s, which replace the datasheet's: per device; for a network, out of a whole node.
    bandwidth: Positive | None = None
    # The share of that which single operations reach, if measured: a library need not send what a ring would.
    operations: dict[str, Positive] = Field(default_factory=dict)
    source: str

    @model_validator(mode="before")
    @classmethod
    def _without_rails(cls, written: object) -> object:
        """Older files have the rails' share here, which now belongs to a cluster."""
        return {k: v for k, v in written.items() if k != "rails"} if isinstance(written, dict) else written

    def reached(self, promised: float) -> float:
        """Bytes/s of large messages on a link with this nominal bandwidth."""
        return self.bandwidth or promised * self.share

    def of(self, operation: str) -> float:
        """An operation's share of that."""
        return self.operations.get(operation, 1.0)


class NodeRates(Hardware):
    """Bytes/s on a device's host: its share of what all devices of a node use."""

    update: Positive  # memory traffic of an optimizer on the host's cores
    link: Positive  # between device and host memory, per direction
    disk_read: Positive
    disk_write: Positive
    disk_both: Positive | None = None  # read and written at the same time, together; None: in turn

    def disk_seconds(self, read: float, written: float) -> float:
        """Seconds to read and to write so many bytes, at the same time as far as there are both."""
        if self.disk_both is None:
            return read / self.disk_read + written / self.disk_write
        both = min(read, written)
        alone = (read - both) / self.disk_read + (written - both) / self.disk_write
        return 2 * both / self.disk_both + alone


class Calibration(Hardware):
    """Everything that a prediction needs to know about a cluster beyond its datasheet."""

    device: DeviceRates
    fast: LinkRates
    network: LinkRates
    host: LinkRates  # between a device and host memory
    known: bool  # whether steps of the device kind were measured; otherwise its rates are estimates or a relative's
    measured: Measurements | None = None  # kernel by kernel, on a machine at hand
    path: str = ""  # of the source file
    links: str = ""  # the source file of the links' rates, if different

    def __hash__(self) -> int:  # cheap, for caches; equality still compares every field
        return hash((self.device.source, self.fast.source, self.path))

    @property
    def words(self) -> str:
        """The origin of the rates, in one line."""
        links = f"; links measured ({self.links})" if self.links else ""
        if self.measured is None:
            source = self.device.source if self.known else f"never measured: {self.device.source}"
            return f"built in ({source}){links}"
        return f"measured here on {self.measured.date[:10]} ({self.path}){links}"


_FITTED = "fitted on a fifth of the published runs (benchmarks/fit_planner.py)"
_FLASH_AMPERE = AttentionRates(forward=0.60, backward=0.50)
_FLASH_HOPPER = AttentionRates(forward=0.33, backward=0.28)

AMPERE = DeviceRates(
    multiprocessors=108,
    matmul=0.87,
    # Set by hand to match the fastest published A100 runs: FlashAttention-2's GPT of 2.7B, 205 TFLOP/s at 2048 tokens
    # (62 % of the peak, attention counted once), and PyTorch's FSDP with compiled blocks, 7B at 64 %.
    sustained=0.87,
    ramp=17.5,
    memory=0.85,
    launch=1e-6,
    flash=_FLASH_AMPERE,
    first_flash=AttentionRates(forward=0.352, backward=0.306),
    fused=_FLASH_AMPERE,
    narrow=1.0,
    batched=0.9,
    source=f"{_FITTED}; flash attention from the FlashAttention-2 paper's A100 figures",
)
HOPPER = AMPERE.model_copy(
    update={
        "multiprocessors": 132,
        "sustained": 1.0,  # products match their measurements in isolation
        # Steps of torchtitan on 8 and 128 H100, and of llm-foundry on 128 and 512, otherwise identical.
        "spread": 0.025,
        "matmul": 0.7,
        "flash": _FLASH_HOPPER,
        "first_flash": AttentionRates(forward=0.249, backward=0.217),
        "fused": AttentionRates(forward=0.60, backward=0.48),
        "source": f"{_FITTED}; products agree with an H200's sustained 667 to 690 TFLOP/s; attention measured there",
    }
)
# The same chip limited to 500 of its 700 W: products and attention slow down with the clock, memory does not.
HOPPER_500_WATTS = HOPPER.model_copy(
    update={
        "matmul": 0.575,
        "flash": AttentionRates(forward=0.271, backward=0.23),
        "first_flash": AttentionRates(forward=0.205, backward=0.178),
        "fused": AttentionRates(forward=0.493, backward=0.395),
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


def _judged(base: DeviceRates, units: int, matmul: float, attention: float = 1.0) -> DeviceRates:
    """A device not measured here: its multiprocessors, the share of its peak in public benchmarks of large products
    (less with a low power limit), and its attention relative to that, compared with ``base``."""

    times = attention * matmul / base.matmul
    return base.model_copy(
        update={
            "multiprocessors": units,
            "matmul": matmul,
            "flash": base.flash.scaled(times, times),
            "first_flash": base.first_flash.scaled(times, times),
            "fused": base.fused.scaled(times, times),
            "source": "by judgement, from public benchmarks of matrix products; never measured here",
        }
    )


DEVICES: dict[str, DeviceRates] = {
    "A100-40GB": AMPERE,
    "A100-80GB": AMPERE,
    "H100": HOPPER,
    "H100-96GB": HOPPER_500_WATTS,
    "H200": HOPPER,
}
# Known only from datasheets and public benchmarks. AMD's libraries reach about half of the peak, where Hopper's reach
# 0.7, and less in attention; before Ampere there is no FlashAttention-2.
JUDGED: dict[str, DeviceRates] = {
    "A800": _judged(AMPERE, 108, AMPERE.matmul),
    "A100-PCIe-80GB": _judged(AMPERE, 108, 0.75),
    "H800": _judged(HOPPER, 132, HOPPER.matmul),
    "GH200": _judged(HOPPER, 132, HOPPER.matmul),
    "H100-PCIe": _judged(HOPPER, 114, 0.62),
    "H100-NVL": _judged(HOPPER, 132, 0.6),
    "H20": _judged(HOPPER, 78, 0.92),
    "B200": _judged(HOPPER, 148, 0.72),
    "GB200": _judged(HOPPER, 152, 0.72),
    "B300": _judged(HOPPER, 148, 0.72),
    "V100-16GB": _judged(AMPERE, 80, 0.72, 0.5),
    "V100-32GB": _judged(AMPERE, 80, 0.72, 0.5),
    "T4": _judged(AMPERE, 40, 0.45, 0.5),
    "L4": _judged(AMPERE, 58, 0.5),
    "L40S": _judged(AMPERE, 142, 0.68),
    "A10G": _judged(AMPERE, 80, 0.8),
    "A6000": _judged(AMPERE, 84, 0.75),
    "RTX3090": _judged(AMPERE, 82, 0.85),
    "RTX4090": _judged(AMPERE, 128, 0.9),
    "RTX5090": _judged(AMPERE, 170, 0.85),
    "MI300X": _judged(HOPPER, 304, 0.47, 0.8),
    "MI325X": _judged(HOPPER, 304, 0.47, 0.8),
    "MI355X": _judged(HOPPER, 256, 0.55, 0.8),
}

FAST = LinkRates(
    share=0.73,
    hop=1.5e-6,
    start=8e-6,
    source=f"{_FITTED}; latency as nccl-tests show it on 8 A100 and 8 H100, 20 to 30 µs for the smallest all-reduce",
)
# nccl-tests: 32 H100 with 8 adapters of 400 Gb/s per node reach 324 of 400 GB/s of bus bandwidth.
NETWORK = LinkRates(share=0.81, hop=1e-5, start=2e-5, source="nccl-tests on 32 H100 over InfiniBand")
# For other fabrics, the latency of a datagram or of a kernel's network stack, estimated.
NETWORKS = {
    "EFA": NETWORK.model_copy(update={"share": 0.95, "hop": 1.5e-5, "start": 4e-5, "source": "by judgement"}),
    "Ethernet": NETWORK.model_copy(update={"hop": 2e-5, "start": 5e-5, "source": "by judgement"}),
    "TCPX": NETWORK.model_copy(update={"share": 0.7, "hop": 4e-5, "start": 8e-5, "source": "by judgement"}),
}
HOST = LinkRates(share=0.87, hop=0.0, start=2e-5, source="H200: pinned copies at 55 of 63 GB/s")

# Estimated for hosts that were not measured. An optimizer on 16 cores beside one H200 updated 1.2e9 parameters in 304
# ms, at 28 bytes each. A node of eight has two sockets with eight channels of DDR5-4800, 614 GB/s; streaming reaches
# two thirds of that.
UPDATE = 110e9
UPDATE_MOST = 400e9
# One disk per device, as in the vendors' reference systems; measured there, bypassing the page cache.
DISK_READ = 2.9e9
DISK_WRITE = 3.3e9
# A plain direct copy of an update's bytes, read and written at once (``disk_floor_s`` in benchmarks/results).
DISK_BOTH = 3.4e9

_installed: dict[str, Calibration] = {}
_installed_links: dict[str, dict[str, LinkRates | str]] = {}


def install(device: str, measured: Calibration) -> None:
    """Make predictions for this device kind use these rates from now on."""
    _installed[device] = measured


def install_links(device: str, fast: LinkRates | None, network: LinkRates | None, path: str) -> None:
    """Make predictions for this device kind use these link rates from now on; None leaves them unchanged."""
    found = {"fast": fast, "network": network, "links": path}
    _installed_links[device] = {name: value for name, value in found.items() if value is not None}


def forget() -> None:
    """Return to the built-in rates."""
    _installed.clear()
    _installed_links.clear()
    steps.forget()


def find(cluster: Cluster) -> Calibration:
    """The rates of a cluster's device kind: measured here, built in, or its nearest relative's."""
    name = cluster.device.name
    found = _installed.get(name) or built_in(cluster.device)
    fabric = NETWORKS.get(cluster.network.kind.partition(" ")[0])
    links = ({"network": fabric} if fabric else {}) | _installed_links.get(name, {})
    return found.model_copy(update=links) if links else found


def node_rates(cluster: Cluster, known: Calibration) -> NodeRates:
    """A device's share of its node. Measurements had one device busy, so they are those of the whole node."""
    devices, seen = cluster.devices_per_node, known.measured
    update = cluster.host_bandwidth or (seen and seen.host_update) or min(UPDATE * devices, UPDATE_MOST)
    copies = seen.copies if seen else None
    read, write = (copies.disk_read, copies.disk_write) if copies else (None, None)
    both = copies.disk_both if copies else None
    return NodeRates(
        update=update / devices,
        # Every copy passes through host memory, which also limits updates.
        link=min(known.host.reached(cluster.device.host_link.bandwidth), update / devices),
        disk_read=read / devices if read else DISK_READ,
        disk_write=write / devices if write else DISK_WRITE,
        # One that was not measured beside the others may not fit them.
        disk_both=both / devices if both else None if read or write else DISK_BOTH,
    )


def built_in(device: Device) -> Calibration:
    rates = known_rates(device.name) or _relative(device)
    return Calibration(device=rates, fast=FAST, network=NETWORK, host=HOST, known=device.name in DEVICES)


def known_rates(device: str) -> DeviceRates | None:
    """The built-in rates of a device kind."""
    return DEVICES.get(device) or JUDGED.get(device)


def _relative(device: Device) -> DeviceRates:
    if device.name == "cpu" or not device.peaks:
        return CPU
    return HOPPER if "fp8" in device.peaks else AMPERE
