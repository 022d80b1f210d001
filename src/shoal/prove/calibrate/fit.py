"""Fit the general model's rates to measurements, for other stacks and for shapes far from those measured."""

from __future__ import annotations

import statistics
from math import exp, log

from shoal.facts import calibration
from shoal.facts.calibration import AttentionRates, DeviceRates
from shoal.facts.calibration.measurements import Attended, Measurements, Product
from shoal.facts.cluster.devices import Device, Precision
from shoal.facts.precision import COMPUTE_BYTES
from shoal.predict.time.kernels import Kernels

# Candidate inner lengths to which the start and end of a tile are equivalent.
RAMPS = (0.0, 8.0, 16.0, 23.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0)
LONG = 2048


def fitted(device: Device, seen: Measurements, precision: Precision, multiprocessors: int) -> DeviceRates:
    """The built-in rates of this device or a related one, with measured values in their place."""
    base = calibration.built_in(device).device
    curves = [curve for found in seen.parts.values() for curve in found.values()]
    start = base.model_copy(
        update={
            "multiprocessors": multiprocessors,
            "launch": min(curve.seconds[0] for curve in curves),
            "memory": min(1.0, max(curve.rate for curve in curves) / seen.bandwidth),
            "source": f"measured on {seen.date[:10]}",
        }
    )
    peak, attention = seen.peaks[precision], seen.attention.get(precision, ())
    width = COMPUTE_BYTES[precision]
    matmul, ramp = _products(start, peak, seen.bandwidth, width, seen.products[precision])
    shares = _attention(base, attention, peak)
    update = {
        "matmul": matmul,
        "ramp": ramp,
        "fused": shares,
        "flash": base.flash_beside(shares),
        **_narrow(attention),
    }
    return start.model_copy(update=update)


def _products(
    rates: DeviceRates, peak: float, bandwidth: float, width: int, products: tuple[Product, ...]
) -> tuple[float, float]:
    """The ramp that best explains what a constant fraction of the peak does not."""
    best = (float("inf"), rates.matmul, rates.ramp)
    for ramp in RAMPS:
        tried = Kernels(rates.model_copy(update={"matmul": 1.0, "ramp": ramp}), peak, bandwidth, width)
        off = [log(one.seconds / tried.product(*one.shape)) for one in products]
        middle = statistics.median(off)
        spread = sum(abs(each - middle) for each in off)
        share = min(1.0, exp(-middle))
        best = min(best, (spread, share, ramp))
    return best[1], best[2]


def _attention(base: DeviceRates, attention: tuple[Attended, ...], peak: float) -> AttentionRates:
    """From long sequences with the widest heads."""
    widest = max((one.head_dim for one in attention), default=0)
    seen = [one for one in attention if one.head_dim == widest and one.seq >= LONG] or list(attention)
    if not seen:
        return base.fused
    forward = statistics.median(one.flops / one.forward for one in seen) / peak
    backward = statistics.median(2.5 * one.flops / one.backward for one in seen) / peak
    return AttentionRates(forward=min(1.0, forward), backward=min(1.0, backward))


def _narrow(attention: tuple[Attended, ...]) -> dict[str, float]:
    """Head size 64 against 128, if both were measured."""
    rates = {
        head_dim: [
            one.flops / (one.forward + one.backward)
            for one in attention
            if one.head_dim == head_dim and one.seq >= LONG
        ]
        for head_dim in (64, 128)
    }
    if not all(rates.values()):
        return {}
    return {"narrow": min(1.0, statistics.median(rates[64]) / statistics.median(rates[128]))}
