"""Which precisions a device computes in: what a plan takes where nothing is said, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.cluster.device import Device, Precision
from shoal.facts.problem import Problem


def has_units(device: Device, precision: str) -> bool:
    """A processor computes anything, and of a device without peaks nothing is known."""
    return device.name == "cpu" or not device.peaks or precision in device.peaks or precision == "fp32"


def usual(device: Device) -> Precision:
    """bf16, which needs no loss scale; fp16 on devices from before it."""
    return "bf16" if has_units(device, "bf16") or "fp16" not in device.peaks else "fp16"


def refused(device: Device, precision: str) -> Iterator[Problem]:
    """Emulated, a narrow precision would be slower than a wide one and lose more."""
    if precision in ("bf16", "fp16", "fp8") and not has_units(device, precision):
        yield Problem(f"{device.name} has no units for {precision}", f"--precision {usual(device)}")
