"""Device: one accelerator, as described by its datasheet.

Units are bytes, bytes/s, FLOP/s, seconds and watts. Peaks are dense, never with sparsity. Links are per direction:
what a vendor calls a 900 GB/s NVLink is 450e9 here. A fast link is per device, a network per adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
# Far beyond any machine, yet safe for arithmetic: products of a few of these are still finite.
Positive = Annotated[FiniteFloat, Field(ge=1e-12, le=1e24)]
Share = Annotated[FiniteFloat, Field(gt=0, le=1)]
Latency = Annotated[FiniteFloat, Field(ge=0, le=1e6)]
Memory = Annotated[int, Field(gt=0, le=1 << 60)]  # bytes
Count = Annotated[int, Field(gt=0, le=1 << 53, strict=True)]

GIB = 2**30

# The precision that software uses if a device has no units for the requested one: the next that loses nothing.
_WIDER: Mapping[Precision, Precision] = {
    "fp8": "bf16",
    "bf16": "fp32",
    "fp16": "fp32",
    "tf32": "fp32",
}


class Hardware(BaseModel):
    """Base of everything that describes machines: frozen, and rejecting unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Hardware):
    """A link of one device: bytes/s in one direction, and seconds before the first byte arrives."""

    kind: str = "unnamed"
    bandwidth: Positive
    latency: Latency


# Latencies are what collective libraries show for the smallest messages, rounded; calibration replaces them.
PCIE4 = Link(kind="PCIe 4.0 x16", bandwidth=31.5e9, latency=5e-6)


class Device(Hardware):
    """One accelerator, or one CPU. What is neither published nor measured is None, or absent from ``peaks``."""

    name: str
    aliases: tuple[str, ...] = ()
    memory_bytes: Memory  # allocatable by a program, as reported by the driver
    peaks: dict[Precision, Positive] = {}  # dense FLOP/s of a matrix product, by precision
    memory_bandwidth: Positive | None = None
    fast: Link | None = None  # None: the devices of a node communicate over host_link
    fast_domain: Count = 1  # devices that the fast link joins
    host_link: Link = PCIE4
    peer_access: bool = (
        True  # whether devices without a fast link copy directly to one another, not through host memory
    )
    nics: Count | None = None  # adapters of a node with ``devices_per_node``; None: one per device
    network: Link = Link(kind="Ethernet 10 Gb/s", bandwidth=1.25e9, latency=50e-6)
    devices_per_node: Count | None = 8  # None: a node holds as many as requested
    power: Positive | None = None
    source: str = "described by the user"

    def __hash__(self) -> int:  # pydantic's own would fail on the dict; equality still compares every field
        return hash((self.name, self.memory_bytes, tuple(sorted(self.peaks.items()))))

    def peak(self, precision: Precision) -> float | None:
        """FLOP/s at a precision; without units for it, those of the next wider one."""
        candidate: Precision | None = precision
        while candidate is not None and candidate not in self.peaks:
            candidate = _WIDER.get(candidate)
        return self.peaks[candidate] if candidate else None
