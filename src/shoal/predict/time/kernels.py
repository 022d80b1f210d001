"""Kernel time on one device: matrix products by shape, attention, memory-bound operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.facts.calibration import DeviceRates
from shoal.facts.calibration.measurements import Way

# Tiles that libraries cut a product's result into, and what a tile of that size reaches of the largest one's rate:
# smaller ones read their inputs more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.6))
# Of a product with few tiles, the inner length can be split; every part then has at least this much of it.
SHORTEST_SPLIT = 512
SPLITS = (1, 2, 4, 8)
# Rows that each expert's tokens cost a grouped product beyond their number: tiles that are not full, and what starts
# anew. On an H200 it lost as much as 160 to 220 more rows per expert would take, of 256, 1,024 and 4,096 rows alike.
GROUP_ROWS = 200


class LayerProduct(NamedTuple):
    """A matrix product of a layer's forward pass: ``times`` kernels, each of one or of as many as there are experts."""

    rows: int  # of each
    inner: int
    columns: int
    times: int
    groups: int = 1
    routed: bool = False  # whether its matrices are those of experts that some tokens are sent to
    parts: int = 1  # of the tokens, each of so many rows and with kernels of its own

    @property
    def parameters(self) -> int:
        return self.times * self.groups * self.inner * self.columns


@dataclass
class Kernels:
    """The kernels of one device at one precision. Shapes repeat from layout to layout, so their times are kept."""

    rates: DeviceRates
    peak: float  # FLOP/s of dense products
    bandwidth: float  # bytes/s of the device's memory
    width: int  # bytes of an element
    _times: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    @property
    def fastest(self) -> float:
        """FLOP/s that no product exceeds."""
        return self.peak * self.rates.matmul

    def product(self, rows: int, inner: int, columns: int, way: Way = "forward", groups: int = 1) -> float:
        """Seconds of [rows, inner] × [inner, columns]; of ``groups`` of them in one kernel. ``way``: whose product it
        is, which matters where each was measured.
        """
        key = rows, inner, columns, groups
        known = self._times.get(key)
        if known is None:
            known = self._times[key] = self._product(rows, inner, columns, groups)
        return known

    def slowed(self, compiled: bool) -> float:
        """How many times as long products take in a step as ``product`` says, by whether its blocks are compiled."""
        return 1.0

    def ways(self, shape: LayerProduct, compiled: bool = False) -> tuple[float, float, float]:
        """Seconds forward, of the inputs' gradients and of the weights'."""
        rows, inner, columns, groups = shape.rows, shape.inner, shape.columns, shape.groups
        times = shape.times * shape.parts * self.slowed(compiled)
        if groups == 1:
            forward = self.product(rows, inner, columns)
            back = self.product(rows, columns, inner, "input")
        else:
            # Experts' rows lie one after another, and every expert's matrix is read.
            every = groups * (rows + GROUP_ROWS)
            least = self.moved(self.width * groups * (rows * (inner + columns) + inner * columns))
            forward = max(self.product(every, inner, columns), least)
            back = max(self.product(every, columns, inner, "input"), least)
        weight = self.product(inner, rows, columns, "weight", groups)
        return times * forward, times * back, times * weight

    def _product(self, rows: int, inner: int, columns: int, groups: int = 1) -> float:
        """The best way to cut it: tiles are computed in waves, one a multiprocessor, and the last wave takes as long
        as a full one. Never faster than its operands can be read and its result written."""
        units, rates = self.rates.multiprocessors, self.rates
        rate = self.peak * rates.matmul / units
        best = float("inf")
        for tile_rows, tile_columns, reached in TILES:
            tiles = groups * -(-rows // tile_rows) * -(-columns // tile_columns)
            for parts in SPLITS:
                if parts > 1 and (inner < parts * SHORTEST_SPLIT or tiles * parts > 2 * units):
                    break
                waves = -(-tiles * parts // units)
                seconds = (
                    waves * 2 * tile_rows * tile_columns * (inner / parts + rates.ramp) / (rate * reached)
                )
                if parts > 1:  # partial results are written and added up in fp32
                    seconds += self.moved(8 * parts * groups * rows * columns)
                best = min(best, seconds)
        least = self.moved(self.width * groups * (rows * inner + inner * columns + rows * columns))
        return max(best, least) + rates.launch

    def attention(self, kernel: str, flops: float, head_dim: int) -> tuple[float, float]:
        """Seconds forward and backward of fused attention whose forward pass has so many FLOPs, counted causally.

        Backward has five products to forward's two: it makes the scores again.
        """
        reached = self.rates.attention(kernel)
        narrow = self.rates.narrow if head_dim <= 64 else (1 + self.rates.narrow) / 2 if head_dim < 128 else 1
        return (
            flops / (self.peak * reached.forward * narrow) + self.rates.launch,
            2.5 * flops / (self.peak * reached.backward * narrow) + self.rates.launch,
        )

    def batched(self, flops: float) -> float:
        """Seconds of batched products, as attention that is not fused has them."""
        return flops / (self.peak * self.rates.batched)

    def moved(self, size: float) -> float:
        """Seconds that reading and writing so many bytes in all takes."""
        return size / (self.bandwidth * self.rates.memory)
