"""The device catalogue: memory, peak rates and links from the vendors' datasheets.

Units are bytes, bytes/s, FLOP/s, seconds and watts. Peaks are dense, never with sparsity. Links are per
direction and per device: what a vendor calls a 900 GB/s NVLink is 450e9 here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
# Far beyond any machine, and far from where arithmetic ends: products of a few of these are still numbers.
Positive = Annotated[FiniteFloat, Field(ge=1e-12, le=1e24)]
Latency = Annotated[FiniteFloat, Field(ge=0, le=1e6)]
Memory = Annotated[int, Field(gt=0, le=1 << 60)]  # bytes
Count = Annotated[int, Field(gt=0, le=1 << 53, strict=True)]

GIB = 2**30

# What software computes in where a device has no units of the asked precision: the next that loses nothing.
_WIDER: Mapping[Precision, Precision] = {
    "fp8": "bf16",
    "bf16": "fp32",
    "fp16": "fp32",
    "tf32": "fp32",
}


class Hardware(BaseModel):
    """Base of everything that describes machines: frozen, and refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Hardware):
    """A way out of one device: bytes/s in one direction, and the seconds before the first byte arrives."""

    kind: str = "unnamed"
    bandwidth: Positive
    latency: Latency


# Latencies are what collective libraries show for the smallest messages, rounded; calibration replaces them.
PCIE4 = Link(kind="PCIe 4.0 x16", bandwidth=31.5e9, latency=5e-6)
PCIE5 = Link(kind="PCIe 5.0 x16", bandwidth=63e9, latency=5e-6)
NVLINK3 = Link(kind="NVLink 3", bandwidth=300e9, latency=3e-6)
NVLINK4 = Link(kind="NVLink 4", bandwidth=450e9, latency=3e-6)
NVLINK5 = Link(kind="NVLink 5", bandwidth=900e9, latency=3e-6)
HDR = Link(kind="InfiniBand HDR 200 Gb/s", bandwidth=25e9, latency=5e-6)
NDR = Link(kind="InfiniBand NDR 400 Gb/s", bandwidth=50e9, latency=5e-6)


class Device(Hardware):
    """One accelerator, or one CPU. What was neither published nor measured is None, or absent from ``peaks``."""

    name: str
    aliases: tuple[str, ...] = ()
    memory_bytes: Memory  # what a program can allocate of, as the driver reports it
    peaks: dict[Precision, Positive] = {}  # dense FLOP/s of a matrix product, by precision
    memory_bandwidth: Positive | None = None
    fast: Link | None = None  # None: the devices of a node reach one another over host_link
    fast_domain: Count = 1  # devices that the fast link joins
    host_link: Link = PCIE4
    network: Link = Link(kind="Ethernet 10 Gb/s", bandwidth=1.25e9, latency=50e-6)
    devices_per_node: Count | None = 8  # None: a node holds as many as are asked for
    power: Positive | None = None
    source: str = "described by the user"

    def __hash__(self) -> int:  # pydantic's own would fail on the dict; equality stays field by field
        return hash((self.name, self.memory_bytes, tuple(sorted(self.peaks.items()))))

    def peak(self, precision: Precision) -> float | None:
        """FLOP/s at a precision; where the device has no units for it, those of the next wider one it has."""
        candidate: Precision | None = precision
        while candidate is not None and candidate not in self.peaks:
            candidate = _WIDER.get(candidate)
        return self.peaks[candidate] if candidate else None


def _usable(gibibytes: float) -> int:
    """The driver's total, seen to two decimals, rounded down to whole MiB so as not to promise more."""
    return int(gibibytes * 1024) * 2**20


def _teraflops(
    fp64: float, fp32: float, tf32: float, half: float, fp8: float | None = None
) -> dict[Precision, float]:
    """Peaks as datasheets print them. No device here has different rates for bf16 and fp16."""
    rates: dict[Precision, float] = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}
    if fp8 is not None:
        rates["fp8"] = fp8
    return {precision: float(round(rate * 1e12)) for precision, rate in rates.items()}


_MEMORY = "Memory: total that CUDA or HIP shows a program (torch reports), lower than nominal."
_NETWORK_DGX = "Network: one adapter a device, as in the vendor's reference system."
_NETWORK_ASSUMED = "Network: assumed, these cards come in many servers."

_A100_PEAKS = _teraflops(19.5, 19.5, 156, 312)
_HOPPER_SXM_PEAKS = _teraflops(66.9, 66.9, 494.7, 989.4, 1978.9)

CPU = Device(
    name="cpu",
    memory_bytes=8 * GIB,
    peaks={"fp64": 40e9, "fp32": 80e9},
    memory_bandwidth=10e9,
    host_link=Link(kind="loopback", bandwidth=2e9, latency=50e-6),
    devices_per_node=None,
    source="No datasheet. Assumed: one core at 2.5 GHz with two 256-bit FMA pipes, 8 GiB and 10 GB/s of "
    "the machine's memory, gloo over loopback. 'local' looks at the machine itself.",
)

DEVICES: tuple[Device, ...] = (
    Device(
        name="A100-40GB",
        aliases=("a100-sxm4-40gb", "a100-sxm-40gb"),
        memory_bytes=_usable(39.49),
        peaks=_A100_PEAKS,
        memory_bandwidth=1555e9,
        fast=NVLINK3,
        fast_domain=8,
        host_link=PCIE4,
        network=HDR,
        power=400,
        source=f"NVIDIA A100 datasheet and DGX A100 datasheet. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="A100-80GB",
        aliases=("a100", "a100-sxm", "a100-sxm4-80gb", "a100-sxm-80gb"),
        memory_bytes=_usable(79.15),
        peaks=_A100_PEAKS,
        memory_bandwidth=2039e9,
        fast=NVLINK3,
        fast_domain=8,
        host_link=PCIE4,
        network=HDR,
        power=400,
        source=f"NVIDIA A100 80GB datasheet and DGX A100 datasheet. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="A100-PCIe-80GB",
        aliases=("a100-pcie", "a100-80gb-pcie"),
        memory_bytes=_usable(79.15),
        peaks=_A100_PEAKS,
        memory_bandwidth=1935e9,
        host_link=PCIE4,
        network=Link(kind="InfiniBand HDR 200 Gb/s for 2 devices", bandwidth=12.5e9, latency=5e-6),
        power=300,
        source=f"NVIDIA A100 80GB PCIe datasheet, without NVLink bridges. {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="H100",
        aliases=("h100-80gb", "h100-sxm", "h100-sxm5", "h100-sxm-80gb", "h100-sxm5-80gb", "h100-80gb-hbm3"),
        memory_bytes=_usable(79.10),
        peaks=_HOPPER_SXM_PEAKS,
        memory_bandwidth=3.35e12,
        fast=NVLINK4,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=700,
        source="NVIDIA H100 datasheet, H100 architecture whitepaper (dense, SXM5), DGX H100 datasheet. "
        f"{_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="H100-96GB",
        aliases=("h100-sxm-96gb", "h100-sxm5-96gb", "h100-96gb-hbm2e", "h100-96gb-hbm3"),
        memory_bytes=_usable(95.00),
        peaks=_HOPPER_SXM_PEAKS,
        memory_bandwidth=2.4e12,
        fast=NVLINK4,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=500,
        source="torchtitan benchmarks/llama3_h100_202412_torchtitan.md: the variant of Meta's Grand Teton, "
        "96 GB HBM2e at 2.4 TB/s, run at a 500 W limit (700 W board), 400 Gb/s a device. Peaks: H100 "
        f"architecture whitepaper, at 700 W. {_MEMORY}",
    ),
    Device(
        name="H100-PCIe",
        aliases=("h100-pcie-80gb", "h100-80gb-pcie"),
        memory_bytes=_usable(79.10),
        peaks=_teraflops(51.2, 51.2, 378, 756, 1513),
        memory_bandwidth=2.039e12,
        host_link=PCIE5,
        network=Link(kind="InfiniBand NDR 400 Gb/s for 2 devices", bandwidth=25e9, latency=5e-6),
        power=350,
        source=f"NVIDIA H100 PCIe product brief, without NVLink bridges. {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="H200",
        aliases=("h200-sxm", "h200-141gb", "h200-sxm-141gb"),
        memory_bytes=143155 * 2**20,
        peaks=_HOPPER_SXM_PEAKS,
        memory_bandwidth=4.8e12,
        fast=NVLINK4,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=700,
        source="NVIDIA H200 datasheet, DGX H200 datasheet. Memory: as torch reports it under driver 580. "
        f"{_NETWORK_DGX}",
    ),
    Device(
        name="B200",
        aliases=("b200-sxm", "b200-180gb", "b200-192gb"),
        memory_bytes=_usable(178.35),
        peaks=_teraflops(37, 75, 1100, 2250, 4500),
        memory_bandwidth=7.7e12,
        fast=NVLINK5,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=1000,
        source="NVIDIA Blackwell datasheet (HGX B200, dense), DGX B200 datasheet; memory bandwidth as later "
        f"editions and the driver's bus width give it, announced as 8 TB/s. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="GB200",
        aliases=("gb200-nvl72", "gb200-186gb"),
        memory_bytes=_usable(184.31),
        peaks=_teraflops(40, 80, 1250, 2500, 5000),
        memory_bandwidth=8e12,
        fast=NVLINK5,
        fast_domain=72,
        host_link=Link(kind="NVLink-C2C, half of a Grace CPU's", bandwidth=225e9, latency=2e-6),
        network=NDR,
        devices_per_node=4,
        power=1200,
        source="NVIDIA GB200 NVL72 datasheet: the rack's figures over its 72 GPUs, halved where they count "
        f"sparsity. A device is one GPU, a node one compute tray. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="L40S",
        aliases=("l40s-48gb",),
        memory_bytes=_usable(44.39),
        peaks=_teraflops(1.43, 91.6, 183, 362, 733),
        memory_bandwidth=864e9,
        host_link=PCIE4,
        network=Link(kind="Ethernet 400 Gb/s for 2 devices", bandwidth=25e9, latency=10e-6),
        power=350,
        source="NVIDIA L40S datasheet (fp64: 1/64 of fp32, Ada architecture whitepaper). "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="RTX4090",
        aliases=("4090", "rtx-4090", "geforce-rtx-4090"),
        memory_bytes=_usable(23.52),
        peaks=_teraflops(1.29, 82.6, 82.6, 165.2, 330.3),
        memory_bandwidth=1008e9,
        host_link=PCIE4,
        network=Link(kind="Ethernet 100 Gb/s for 8 devices", bandwidth=1.5625e9, latency=20e-6),
        power=450,
        source="NVIDIA Ada architecture whitepaper, rates with fp32 accumulation, which training needs (half "
        f"of those with fp16 accumulation). {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="MI300X",
        aliases=("instinct-mi300x", "instinct-mi300x-oam"),
        memory_bytes=_usable(191.69),
        peaks=_teraflops(163.4, 163.4, 653.7, 1307.4, 2614.9),
        memory_bandwidth=5.3e12,
        # All seven links together; between one pair of devices it is a seventh.
        fast=Link(kind="Infinity Fabric, 7 links", bandwidth=448e9, latency=3e-6),
        fast_domain=8,
        host_link=PCIE5,
        network=Link(kind="Ethernet or InfiniBand 400 Gb/s", bandwidth=50e9, latency=5e-6),
        power=750,
        source="AMD Instinct MI300X data sheet (matrix rates) and platform data sheet. "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    CPU,
)


# Not catalogued, and not one with its name cut short.
_ANOTHER = {"h20"}


def normalised(name: str) -> str:
    """A device's name without case, spaces and maker, so that a driver's spelling finds its entry."""
    words = name.lower().replace("_", "-").replace(" ", "-").strip("-")
    return words.removeprefix("nvidia-").removeprefix("amd-")


_BY_NAME: Mapping[str, Device] = {
    normalised(name): device for device in DEVICES for name in (device.name, *device.aliases)
}


def find(name: str) -> Device | None:
    """The entry of that name or alias, in any case and as drivers spell it; None where there is none."""
    return _BY_NAME.get(normalised(name))


def unknown(name: str) -> tuple[str, str]:
    """For a name that is not found: what is wrong with it, and what would put it right.

    An entry is suggested where its name was begun or is written differently, never where it only looks alike: a plan
    for another device would be off by as much as they differ.
    """
    catalogue = f"known: {', '.join(device.name for device in DEVICES)}"
    words = normalised(name)
    if not words:
        return "the device is missing", f"{catalogue}; or describe it in a TOML file"
    # notation.py has all that may stand in such a file.
    described = (
        "describe it in a cluster TOML, with its datasheet's numbers in place of these: "
        f"device = {{name = {json.dumps(name.strip())}, memory_bytes = 32e9, peaks = {{bf16 = 100e12}}}}"
    )
    family = re.match(r"[a-z]+-?[0-9]+", words)
    entries = {normalised(device.name): device.name for device in DEVICES}
    relatives = [entry for key, entry in entries.items() if family and key.split("-")[0] == family[0]]
    begun = [
        entry
        for key, entry in entries.items()
        if words not in _ANOTHER and key.startswith(words) and _letters(key) == _letters(words)
    ]
    if len(begun) == 1:
        return f"there is no device {name!r}", f"did you mean {begun[0]!r}?"
    if relatives:
        return (
            f"there is no device {name!r}",
            f"of its kind the catalogue has {', '.join(relatives)}; or {described}",
        )
    return f"the device {name!r} is not in the catalogue", f"{described}; {catalogue}"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name)
