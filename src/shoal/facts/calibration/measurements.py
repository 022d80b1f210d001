"""Measurements of one machine by ``shoal profile --calibrate``: kernels, copies, host.

Seconds and sizes as they were measured, not what was fitted to them, so that a better model can use an older file.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from shoal.facts.cluster.devices import Count, Hardware, Positive, Precision

Seconds = Annotated[FiniteFloat, Field(ge=0, le=1e9)]


class Curve(Hardware):
    """Seconds of one kind of work by the bytes that it moves."""

    sizes: Annotated[tuple[Positive, ...], Field(min_length=1)]  # ascending
    seconds: tuple[Positive, ...]

    @model_validator(mode="after")
    def _pairs(self) -> Curve:
        if len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes must ascend, with a time for each")
        return self

    def at(self, size: float) -> float:
        """Between two sizes on the line that joins them in logarithms; below all of them, where starting a kernel is
        what takes time, as long as the smallest; above, at the rate of the largest."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        right = bisect_left(sizes, size)
        left = right - 1
        share = log(size / sizes[left]) / log(sizes[right] / sizes[left])
        return exp((1 - share) * log(seconds[left]) + share * log(seconds[right]))

    @property
    def rate(self) -> float:
        """Bytes/s at the largest size."""
        return self.sizes[-1] / self.seconds[-1]


# A linear layer's three products: its result, the gradient of its input, the gradient of its weight.
Way = Literal["forward", "input", "weight"]


class Product(Hardware):
    """[rows, inner] × [inner, columns], laid out in memory as that product of a linear layer is."""

    way: Way
    rows: Count
    inner: Count
    columns: Count
    seconds: Positive

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.inner, self.columns

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns


class Attended(Hardware):
    """Causal attention over some sequences."""

    head_dim: Count
    heads: Count
    kv_heads: Count
    seq: Count
    sequences: Count
    forward: Positive  # seconds
    backward: Positive

    @property
    def flops(self) -> float:
        """Of the forward pass, the work counted causally: two products of half the square."""
        return 2.0 * self.sequences * self.heads * self.head_dim * self.seq**2


class HostWork(Hardware):
    """Seconds that the host takes to start what a step consists of. On a CPU nothing: there the host computes, and
    what it takes is in the kernels' times."""

    forward: Seconds  # an operator of the forward pass, with all that autograd and Python do for it
    backward: Seconds
    selective: Seconds  # what selective recomputation adds, for each operator of the forward pass
    full: Seconds
    once: Seconds  # a step, beside its micro-batches
    tensor: Seconds  # a parameter that is updated


class Copies(Hardware):
    """Bytes/s between places; None where there is no such way, or it could not be measured."""

    to_device: Positive | None  # from pinned memory
    to_host: Positive | None
    disk_write: Positive | None  # past the system's cache
    disk_read: Positive | None


class Measurements(Hardware):
    """Everything that was measured of one device kind, and under which circumstances."""

    device: str
    date: str  # ISO 8601, UTC
    seconds: Seconds  # that measuring took
    versions: dict[str, str]  # torch, cuda, driver, shoal, python
    power_limit: Positive | None  # watts
    clock: Positive | None  # MHz, as the driver says under load
    peaks: dict[Precision, Positive]  # FLOP/s that shares of the peak refer to
    bandwidth: Positive  # bytes/s of memory, likewise
    sustained: Positive  # FLOP/s of one large product again and again: what the power limit leaves
    mixed: Positive  # and of the same one among all the others, and among what moves bytes
    busy: Annotated[
        FiniteFloat, Field(gt=0, le=1)
    ]  # the share that products and attention have of such a mix
    products: dict[Precision, tuple[Product, ...]]
    attention: dict[Precision, tuple[Attended, ...]]
    # What only moves bytes, by the names of predict/time/operators.py; the precision is that of activations.
    parts: dict[Precision, dict[str, Curve]]
    host: HostWork | None
    copies: Copies
    # Bytes/s of memory that an update on all of the host's cores moves; None where it could not be measured, or in a
    # file that is older than that.
    host_update: Positive | None = None
    missing: tuple[str, ...] = ()  # what could not be measured, each with its reason
