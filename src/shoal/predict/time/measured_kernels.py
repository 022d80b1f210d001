"""Kernel times on a calibrated device, interpolated from measured shapes.

A measured product or attention shape returns its measured time. Any other shape returns the general model of
``kernels.py`` times that model's error at measured shapes, with the nearest weighing most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log, log2

from shoal.facts.calibration import Calibration
from shoal.facts.calibration.measurements import Attended, Curve, Measurements, Way
from shoal.facts.cluster.devices import Precision
from shoal.predict.time.kernels import Kernels
from shoal.predict.time.operators import OperatorWork, Widths

# A measured shape's weight falls with this power of its distance.
FALLOFF = 4
# Distances are in doublings; shapes closer than this are the same.
SAME = 1e-3
# Head size 64 uses another kernel than 128, so a doubling there counts as several.
HEAD_SIZE_APART = 4.0
# How often an optimizer reads and writes a weight or state, besides its gradient. SGD keeps one moment instead of two;
# optimizers that run operator by operator read and write temporaries as well.
PASSES = {"adamw": 6, "sgd": 4, "lion": 24, "muon": 26, "adafactor": 29}

Place = tuple[float, ...]


@dataclass
class Correction:
    """A model's error at measured places, interpolated in between."""

    known: list[tuple[Place, float]]  # with log(measured / modelled)

    def at(self, place: Place) -> float:
        total = weighed = 0.0
        for other, off in self.known:
            square = sum((a - b) ** 2 for a, b in zip(place, other, strict=True))
            weight = 1 / (square + SAME**2) ** (FALLOFF / 2)
            total += weight
            weighed += weight * off
        return exp(weighed / total)


class MeasuredKernels(Kernels):
    """The kernels of one calibrated device, as launched by Shoal's own engine at one precision."""

    def __init__(
        self,
        rates: Calibration,
        measured: Measurements,
        precision: Precision,
        widths: Widths,
        shared: float = 1.0,
    ) -> None:
        """``shared``: ranks that share what was measured as one device, such as a CPU's cores."""
        like: Precision = "bf16" if precision == "fp16" else precision
        peak = measured.peaks.get(like) or measured.peaks.get("fp32") or 1e12
        super().__init__(rates.device, peak, measured.bandwidth, widths.compute)
        self.widths, self.shared = widths, shared
        # Parts not measured at this precision take as long as the same bytes at another.
        self.parts: dict[str, Curve] = {}
        for other in (*(name for name in measured.parts if name != like), like):
            self.parts.update(measured.parts.get(other, {}))
        self.host = measured.host
        # With few kernels besides products, a step runs as close to the power limit as products alone: products are
        # then slower by what a large one lost when sustained. fp32 did not reach the limit.
        self._at_limit = max(1.0, measured.mixed / measured.sustained) if like == "bf16" else 1.0
        # The tile model does not apply to products without tensor cores, which fill a device evenly.
        self._tiles = like != "fp32" or "bf16" not in measured.peaks
        seen = [one.flops / one.seconds for one in measured.products.get(like, ())]
        self._fastest = max(seen, default=peak * rates.device.matmul) / shared
        self._shapes: dict[tuple[str, int, int, int, int], float] = {}
        self._off: dict[str, Correction] = {}
        for way in ("forward", "input", "weight"):
            mine = [one for one in measured.products.get(like, ()) if one.way == way]
            self._off[way] = Correction(
                [(_shape(*one.shape), log(one.seconds / self._modelled(*one.shape))) for one in mine]
            )
        attended = measured.attention.get(like, ())
        self._forward = Correction([(_heads(one), log(one.forward / one.flops)) for one in attended])
        self._backward = Correction([(_heads(one), log(one.backward / one.flops)) for one in attended])

    @property
    def fastest(self) -> float:
        return self._fastest

    def slowed(self, compiled: bool) -> float:
        return self._at_limit if compiled else 1.0

    def _modelled(self, rows: int, inner: int, columns: int, groups: int = 1) -> float:
        if not self._tiles:
            return 2.0 * groups * rows * inner * columns / self.peak
        return super()._product(rows, inner, columns, groups)

    def product(self, rows: int, inner: int, columns: int, way: Way = "forward", groups: int = 1) -> float:
        key = way, rows, inner, columns, groups
        known = self._shapes.get(key)
        if known is None:
            seconds = self._modelled(rows, inner, columns, groups)
            if self._off[way].known:
                seconds *= self._off[way].at(_shape(rows, inner, columns))
            # Never faster than the fastest product seen.
            least = 2.0 * groups * rows * inner * columns / self.fastest
            known = self._shapes[key] = max(self.shared * seconds, least)
        return known

    @property
    def attends(self) -> bool:
        """Whether attention was measured at this precision."""
        return bool(self._forward.known)

    def attended(
        self, shape: tuple[int, int, int, int, int], flops: float, flash: bool = False
    ) -> tuple[float, float]:
        """Seconds of causal attention, forward and backward; ``shape``: (head size, heads, key heads, length,
        sequences).

        Measured without a window. With a window, or in a ring, the flash kernel is used, which is slower by the ratio
        of the built-in rates.
        """
        if not self.attends:
            forward, backward = self.attention("flash" if flash else "fused", flops, shape[0])
            return self.shared * forward, self.shared * backward
        place = _place(*shape)
        fused, slower = self.rates.fused, self.rates.flash
        ahead, back = (fused.forward / slower.forward, fused.backward / slower.backward) if flash else (1, 1)
        return (
            self.shared * flops * ahead * self._forward.at(place),
            self.shared * flops * back * self._backward.at(place),
        )

    def works(self, works: Iterable[OperatorWork]) -> float:
        """Seconds of operators that only move bytes."""
        return sum(self._work(work) for work in works)

    def _work(self, work: OperatorWork) -> float:
        if not work.operators:
            return 0.0
        curve = self.parts.get(work.part) or self.parts.get(work.part.removeprefix("wide "))
        if curve is not None:
            return self.shared * curve.at(work.bytes)
        return self.moved(work.bytes) + work.operators * self.rates.launch

    def moved(self, size: float) -> float:
        return self.shared * super().moved(size)

    def updated(self, elements: float, optimizer: str, copied: bool, gradient: float) -> float:
        """Seconds of the gradient norm and the optimizer over ``elements`` parameters; ``gradient``: bytes of each
        gradient.

        ``copied``: with working copies, which AdamW writes in the same pass.
        """
        states, compute = self.widths.states, self.widths.compute
        passes = PASSES[optimizer]
        copy = compute if copied and compute < states else 0
        return self.works(
            [
                OperatorWork(f"adamw {8 * states} bit", (passes * states + gradient + copy) * elements, 1),
                OperatorWork(f"norm {8 * round(gradient)} bit", gradient * elements, 1),
            ]
        )


def _shape(rows: int, inner: int, columns: int) -> Place:
    return log2(rows), log2(inner), log2(columns)


def _heads(one: Attended) -> Place:
    return _place(one.head_dim, one.heads, one.kv_heads, one.seq, one.sequences)


def _place(head_dim: int, heads: int, kv_heads: int, seq: int, sequences: int) -> Place:
    """Coordinates for interpolation: width, length and count; how keys are shared hardly matters."""
    return (
        HEAD_SIZE_APART * log2(head_dim),
        log2(seq),
        log2(heads * sequences) / 2,
        log2(heads / kv_heads) / 4,
    )
