"""A calibration in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.facts.calibration import Calibration
from shoal.facts.calibrationfile import Stored
from shoal.prove.calibrate.drift import Rate, words


@dataclass(frozen=True)
class Measured:
    """A calibration that was just made."""

    path: Path
    stored: Stored
    drift: list[Rate]  # against the one before
    since: str | None  # when that was made

    @property
    def rates(self) -> Calibration:
        return self.stored.calibration(self.path)

    def lines(self) -> list[str]:
        found = self.stored.measured
        return [
            f"{found.device}: measured in {found.seconds:.0f} s, saved to {self.path}",
            *_lines(self.stored),
            *(words(self.drift, self.since) if self.since else []),
        ]


def _lines(stored: Stored) -> Iterator[str]:
    seen = stored.measured
    power = f", {seen.power_limit:.0f} W" if seen.power_limit else ""
    clock = f", {seen.clock:.0f} MHz under load" if seen.clock else ""
    yield f"  {', '.join(f'{name} {version}' for name, version in seen.versions.items())}{power}{clock}"
    for precision, products in seen.products.items():
        rates = sorted(one.flops / one.seconds / 1e12 for one in products)
        yield (
            f"  products {precision}: {rates[0]:.4g} to {rates[-1]:.4g} TFLOP/s, {len(products)} shapes; "
            f"at most {seen.peaks[precision] / 1e12:.4g} promised or seen"
        )
    yield (
        f"  one large product: {seen.mixed / 1e12:.4g} TFLOP/s among the rest, {seen.sustained / 1e12:.4g} alone; "
        f"products and attention had {seen.busy:.0%} of the time"
    )
    for precision, attention in seen.attention.items():
        rates = sorted(3.5 * one.flops / (one.forward + one.backward) / 1e12 for one in attention)
        yield f"  attention {precision}: {rates[0]:.4g} to {rates[-1]:.4g} TFLOP/s, {len(attention)} shapes"
    for precision, curves in seen.parts.items():
        for part, curve in curves.items():
            least = min(curve.seconds) * 1e6
            yield f"  {part} {precision}: {curve.rate / 1e9:.4g} GB/s, at least {least:.3g} µs"
    host, copies = seen.host, seen.copies
    if host is not None and host.forward:
        yield (
            f"  host: {host.forward * 1e6:.3g} µs an operator forward, {host.backward * 1e6:.3g} backward; "
            f"{host.once * 1e3:.3g} ms a step"
        )
    if copies.to_device and copies.to_host:
        yield f"  host to device {copies.to_device / 1e9:.3g} GB/s, back {copies.to_host / 1e9:.3g} GB/s"
    if copies.disk_write and copies.disk_read:
        yield f"  disk: {copies.disk_write / 1e9:.3g} GB/s written, {copies.disk_read / 1e9:.3g} GB/s read"
    if (fast := stored.fast) is not None and fast.bandwidth:
        yield f"  links ({fast.source}): {fast.bandwidth / 1e9:.3g} GB/s, {(fast.start + fast.hop) * 1e6:.3g} µs"
    else:
        yield "  links: not measured, so the built-in rates remain"
    for missing in seen.missing:
        yield f"  not measured: {missing}"
