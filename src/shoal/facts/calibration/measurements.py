"""Measurements of one machine by ``shoal profile --calibrate``: kernels, copies, host.

Raw seconds and sizes instead of fitted values, so that a better model can use an older file.
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
        """Log-linear between two sizes; below the smallest, its time (launch-bound); above the largest, its rate."""
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


# A linear layer's three products: its output, its input gradient, its weight gradient.
Way = Literal["forward", "input", "weight"]


class Product(Hardware):
    """[rows, inner] × [inner, columns], with the memory layout of that product in a linear layer."""

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
        """Forward FLOPs, counted causally: two products of half the square."""
        return 2.0 * self.sequences * self.heads * self.head_dim * self.seq**2


class HostWork(Hardware):
    """Seconds for the host to launch the parts of a step. Zero on a CPU, where the host computes and the kernels'
    times include everything."""

    forward: Seconds  # per operator of the forward pass, including autograd and Python
    backward: Seconds
    selective: Seconds  # added by selective recomputation, per operator of the forward pass
    full: Seconds
    once: Seconds  # per step, besides its micro-batches
    tensor: Seconds  # per updated parameter


class Copies(Hardware):
    """Bytes/s between places; None if there is no such path, or it could not be measured."""

    to_device: Positive | None  # from pinned memory
    to_host: Positive | None
    disk_write: Positive | None  # bypassing the page cache
    disk_read: Positive | None
    disk_both: Positive | None = None  # read and written at the same time, together


class Measurements(Hardware):
    """Everything measured on one device kind, and the circumstances."""

    device: str
    date: str  # ISO 8601, UTC
    seconds: Seconds  # that the measurement took
    versions: dict[str, str]  # torch, cuda, driver, shoal, python
    power_limit: Positive | None  # watts
    clock: Positive | None  # MHz under load, as reported by the driver
    peaks: dict[Precision, Positive]  # FLOP/s that shares of the peak refer to
    bandwidth: Positive  # bytes/s of memory, likewise
    sustained: Positive  # FLOP/s of one large product repeated: what the power limit leaves
    mixed: Positive  # the same product amid all others, and amid memory traffic
    busy: Annotated[FiniteFloat, Field(gt=0, le=1)]  # the share of products and attention in such a mix
    products: dict[Precision, tuple[Product, ...]]
    attention: dict[Precision, tuple[Attended, ...]]
    # Operators that only move bytes, under their names in predict/time/operators.py; by the precision of activations.
    parts: dict[Precision, dict[str, Curve]]
    host: HostWork | None
    copies: Copies
    # Bytes/s of memory that an update on all of the host's cores moves; None if it could not be measured, or in an
    # older file.
    host_update: Positive | None = None
    missing: tuple[str, ...] = ()  # what could not be measured, each with its reason
