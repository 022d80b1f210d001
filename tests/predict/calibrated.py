"""A calibration of an imaginary H200 whose kernels all run at round rates, for tests that change one of them."""

from __future__ import annotations

from typing import Any

from shoal.facts import calibration
from shoal.facts.calibration.file import FORMAT, Stored
from shoal.facts.calibration.measurements import Attended, Copies, Curve, HostWork, Measurements, Product

RATE, BANDWIDTH, ATTENTION = 500e12, 4e12, 400e12
HOST = HostWork(forward=5e-6, backward=6e-6, selective=3e-6, full=6e-6, once=1e-3, tensor=1e-6)
PARTS = (
    *("norm", "norm backward", "rotary", "rotary backward", "gate", "gate backward", "add", "copy", "sum"),
    *("loss", "lookup", "lookup backward", "weights"),
    *("adamw 32 bit", "adamw 16 bit", "norm 32 bit", "norm 16 bit"),
)
DATE = "2026-11-15T12:00:00Z"


def measurements(**changes: Any) -> Measurements:
    products = tuple(
        Product(way=way, rows=rows, inner=inner, columns=columns, seconds=2 * rows * inner * columns / RATE)
        for way in ("forward", "input", "weight")
        for rows, inner, columns in ((4096, 2048, 2048), (4096, 2048, 8192), (4096, 8192, 2048))
    )
    attended = tuple(
        Attended(
            head_dim=64, heads=32, kv_heads=8, seq=seq, sequences=1, forward=flops / ATTENTION,
            backward=2.5 * flops / ATTENTION,
        )
        for seq in (2048, 4096)
        if (flops := 2.0 * 32 * 64 * seq**2)
    )  # fmt: skip
    sizes = (1e6, 1e8, 1e10)
    curve = Curve(sizes=sizes, seconds=tuple(size / BANDWIDTH for size in sizes))
    given = {
        "device": "H200",
        "date": DATE,
        "seconds": 90.0,
        "versions": {"torch": "2.11.0"},
        "power_limit": 700.0,
        "clock": 1500.0,
        "peaks": {"bf16": 989e12},
        "bandwidth": 4.8e12,
        "sustained": RATE,
        "mixed": RATE,
        "busy": 0.6,
        "products": {"bf16": products},
        "attention": {"bf16": attended},
        "parts": {"bf16": dict.fromkeys(PARTS, curve)},
        "host": HOST,
        "copies": Copies(to_device=55e9, to_host=55e9, disk_write=1.6e9, disk_read=2.9e9),
    }
    return Measurements.model_validate(given | changes)


def stored(**changes: Any) -> Stored:
    return Stored(
        format=FORMAT, measured=measurements(**changes), device=calibration.HOPPER, fast=None, host=None
    )


def faster(times: float) -> dict[str, Any]:
    """Products that run at so many times the rate."""
    products = measurements().products["bf16"]
    return {
        "products": {
            "bf16": tuple(one.model_copy(update={"seconds": one.seconds / times}) for one in products)
        }
    }
