"""Which precisions a device supports: the default of a plan, and what it rejects."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.cluster.device import Device, Precision
from shoal.facts.problem import Problem


def has_units(device: Device, precision: str) -> bool:
    """Whether a device has units for a precision. A CPU supports all; without peaks a device is assumed to."""
    return device.name == "cpu" or not device.peaks or precision in device.peaks or precision == "fp32"


def usual(device: Device) -> Precision:
    """bf16, which needs no loss scale; fp16 on older devices without it."""
    return "bf16" if has_units(device, "bf16") or "fp16" not in device.peaks else "fp16"


def refused(device: Device, precision: str) -> Iterator[Problem]:
    """Reject precisions without hardware support: emulated, a narrow one is both slower and less exact."""
    if precision in ("bf16", "fp16", "fp8") and not has_units(device, precision):
        yield Problem(f"{device.name} has no units for {precision}", f"--precision {usual(device)}")
