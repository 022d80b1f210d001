"""Kernel time on one device: matrix products by shape, attention, memory-bound operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.facts.calibration import DeviceRates
from shoal.facts.calibration.measurements import Way

# Tile sizes into which libraries cut a product's result, and the rate of each relative to the largest tile: smaller
# tiles read their inputs more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.6))
# A product with few tiles can split its inner dimension (split-K); every part then has at least this length.
SHORTEST_SPLIT = 512
SPLITS = (1, 2, 4, 8)
# Extra rows that each expert costs in a grouped product: partly filled tiles and start-up. On an H200 the loss equals
# 160 to 220 more rows per expert, at 256, 1,024 and 4,096 rows alike.
GROUP_ROWS = 200


class LayerProduct(NamedTuple):
    """A matrix product in a layer's forward pass: ``times`` kernels, each of one matrix or of one per expert."""

    rows: int  # per matrix
    inner: int
    columns: int
    times: int
    groups: int = 1
    routed: bool = False  # whether these are routed experts' matrices
    parts: int = 1  # parts of the tokens, each with ``rows`` rows and kernels of its own

    @property
    def parameters(self) -> int:
        return self.times * self.groups * self.inner * self.columns


@dataclass
class Kernels:
    """Kernel times of one device at one precision. Shapes recur across layouts, so results are cached."""

    rates: DeviceRates
    peak: float  # FLOP/s of dense products
    bandwidth: float  # bytes/s of device memory
    width: int  # bytes of an element
    _times: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    @property
    def fastest(self) -> float:
        """FLOP/s that no product exceeds."""
        return self.peak * self.rates.matmul

    def product(self, rows: int, inner: int, columns: int, way: Way = "forward", groups: int = 1) -> float:
        """Seconds of [rows, inner] × [inner, columns], or of ``groups`` of them in one kernel. ``way`` (forward, input
        or weight gradient) matters only for measured devices.
        """
        key = rows, inner, columns, groups
        known = self._times.get(key)
        if known is None:
            known = self._times[key] = self._product(rows, inner, columns, groups)
        return known

    def slowed(self, compiled: bool) -> float:
        """How many times longer products take in a step than ``product`` says; ``compiled``: whether blocks are."""
        return 1.0

    def ways(self, shape: LayerProduct, compiled: bool = False) -> tuple[float, float, float]:
        """Seconds of the forward product, of the input gradients and of the weight gradients."""
        rows, inner, columns, groups = shape.rows, shape.inner, shape.columns, shape.groups
        times = shape.times * shape.parts * self.slowed(compiled)
        if groups == 1:
            forward = self.product(rows, inner, columns)
            back = self.product(rows, columns, inner, "input")
        else:
            # Experts' rows are contiguous, and every expert's matrix is read.
            every = groups * (rows + GROUP_ROWS)
            least = self.moved(self.width * groups * (rows * (inner + columns) + inner * columns))
            forward = max(self.product(every, inner, columns), least)
            back = max(self.product(every, columns, inner, "input"), least)
        weight = self.product(inner, rows, columns, "weight", groups)
        return times * forward, times * back, times * weight

    def _product(self, rows: int, inner: int, columns: int, groups: int = 1) -> float:
        """The best tiling: tiles run in waves, one per multiprocessor, and a partial last wave takes as long as a full
        one. Never faster than reading the operands and writing the result."""
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
                if parts > 1:  # partial results are written and summed in fp32
                    seconds += self.moved(8 * parts * groups * rows * columns)
                best = min(best, seconds)
        least = self.moved(self.width * groups * (rows * inner + inner * columns + rows * columns))
        return max(best, least) + rates.launch

    def attention(self, kernel: str, flops: float, head_dim: int) -> tuple[float, float]:
        """Seconds forward and backward of fused attention; ``flops``: causal FLOPs of the forward pass.

        Backward has five products to forward's two, because it recomputes the scores.
        """
        reached = self.rates.attention(kernel)
        narrow = self.rates.narrow if head_dim <= 64 else (1 + self.rates.narrow) / 2 if head_dim < 128 else 1
        return (
            flops / (self.peak * reached.forward * narrow) + self.rates.launch,
            2.5 * flops / (self.peak * reached.backward * narrow) + self.rates.launch,
        )

    def batched(self, flops: float) -> float:
        """Seconds of batched products, as used by unfused attention."""
        return flops / (self.peak * self.rates.batched)

    def moved(self, size: float) -> float:
        """Seconds to read and write ``size`` bytes in total."""
        return size / (self.bandwidth * self.rates.memory)
