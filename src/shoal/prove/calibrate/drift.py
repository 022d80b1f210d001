"""Compare a new calibration with the previous one, in numbers and words."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.facts.calibration.file import Stored
from shoal.facts.calibration.measurements import Measurements

# Two calibrations of one idle machine differ by less than this.
NOTABLE = 0.05

# Possible reasons for a change, by what changed.
REASONS = {
    "matrix products": "power cap, clock or another tenant",
    "attention": "power cap, clock, another kernel or another tenant",
    "moved bytes": "memory clock or another tenant",
    "host operators": "a busy or different processor",
    "host update": "a busy or different processor or memory",
    "copies": "a different or busy link to the host",
    "disk": "a different or busy disk",
    "links": "a different or busy path between devices",
}


@dataclass(frozen=True)
class Rate:
    """One rate of a machine; more is better."""

    kind: str
    unit: str
    old: float
    new: float

    @property
    def change(self) -> float:
        return self.new / self.old - 1

    @property
    def notable(self) -> bool:
        return abs(self.change) > NOTABLE


def compared(old: Stored, new: Stored) -> list[Rate]:
    """Everything that both have."""
    return [
        Rate(kind, unit, before, after)
        for (kind, unit, before), (_, _, after) in zip(
            _rates(old.measured, old, new), _rates(new.measured, new, old), strict=True
        )
    ]


def _rates(measured: Measurements, stored: Stored, other: Stored) -> Iterator[tuple[str, str, float]]:
    """Only shapes that the other calibration has too."""
    theirs = other.measured
    for precision in sorted(measured.products.keys() & theirs.products.keys()):
        known = {(one.way, one.shape) for one in theirs.products[precision]}
        seen = [one for one in measured.products[precision] if (one.way, one.shape) in known]
        if seen:
            rate = sum(one.flops for one in seen) / sum(one.seconds for one in seen)
            yield "matrix products", f"TFLOP/s {precision}", rate / 1e12
    for precision in sorted(measured.attention.keys() & theirs.attention.keys()):
        shapes = {one.model_dump_json(exclude={"forward", "backward"}) for one in theirs.attention[precision]}
        attended = [
            one
            for one in measured.attention[precision]
            if one.model_dump_json(exclude={"forward", "backward"}) in shapes
        ]
        if attended:
            rate = sum(3.5 * one.flops for one in attended)
            yield (
                "attention",
                f"TFLOP/s {precision}",
                rate / sum(one.forward + one.backward for one in attended) / 1e12,
            )
    for precision in sorted(measured.parts.keys() & theirs.parts.keys()):
        curves, others = measured.parts[precision], theirs.parts[precision]
        parts = [part for part in curves if part in others and curves[part].sizes == others[part].sizes]
        if parts:
            rate = statistics.geometric_mean(curves[part].rate for part in parts)
            yield "moved bytes", f"GB/s {precision}", rate / 1e9
    if measured.host and theirs.host and measured.host.forward and theirs.host.forward:
        yield "host operators", "thousand/s", 1e-3 / measured.host.forward
    if measured.host_update and theirs.host_update:
        yield "host update", "GB/s", measured.host_update / 1e9
    for kind, way, unit in (
        ("copies", "to_device", "GB/s to the device"),
        ("copies", "to_host", "GB/s to the host"),
        ("disk", "disk_write", "GB/s written"),
        ("disk", "disk_read", "GB/s read"),
    ):
        mine, yours = getattr(measured.copies, way), getattr(theirs.copies, way)
        if mine and yours:
            yield kind, unit, mine / 1e9
    ours, other_link = stored.fast, other.fast
    if ours and other_link and ours.bandwidth and other_link.bandwidth:
        yield "links", "GB/s", ours.bandwidth / 1e9


def words(rates: list[Rate], since: str) -> list[str]:
    """A table old → new, and a sentence for each notable change."""
    lines = [f"against {since[:10]}:"]
    for rate in rates:
        lines.append(
            f"  {rate.kind:<16} {rate.old:10.4g} → {rate.new:10.4g} {rate.unit:<16} {rate.change:+.1%}"
        )
    for rate in rates:
        if rate.notable:
            less = "less" if rate.change < 0 else "more"
            lines.append(
                f"drift: {rate.kind} reach {rate.new:.4g} {rate.unit}, {abs(rate.change):.0%} {less} than on "
                f"{since[:10]}: {REASONS[rate.kind]}"
            )
    return lines
