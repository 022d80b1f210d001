"""Spikes: a loss or gradient norm far above the usual.

Usual is the median of the last steps, and the spread is their median distance from it: a few outliers move neither.
Both are functions of the last rows of metrics.jsonl, so a resumed run judges like an uninterrupted one; and since
losses and norms are the global batch's, every rank judges alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Literal

from shoal.train.metrics.meter import finite

# Steps in the window; nothing is judged before there are this many.
WINDOW = 64
FEWEST = 16
# Converts the median absolute deviation of a normal distribution into its standard deviation.
OF_NORMAL = 1.4826
# A deviation is at least this fraction of the median, so that near-constant numbers do not turn small differences into
# spikes.
LEAST = 0.01

Policy = Literal["warn", "skip"]


class RunningMedian:
    """The window of one number over the last steps."""

    def __init__(self) -> None:
        self._last: deque[float | None] = deque(maxlen=WINDOW)

    def add(self, value: float | None) -> None:
        """None, as in metrics.jsonl, stands for a non-finite value, which another guard handles."""
        # Outliers included: the window then depends on the last rows only, and a new level becomes usual.
        self._last.append(finite(value))

    def deviations(self, value: float) -> float:
        """How many robust standard deviations a value is above the median; 0 if there are too few values to judge."""
        unit = self._deviation()
        return (value - self.value) / unit if unit and math.isfinite(value) else 0.0

    def above(self, deviations: float) -> float:
        """The value that many deviations above the median; infinity if there are too few values to judge."""
        unit = self._deviation()
        return self.value + deviations * unit if unit else math.inf

    def _deviation(self) -> float:
        known = self._known()
        if len(known) < FEWEST:
            return 0.0
        usual = median(known)
        spread = OF_NORMAL * median(abs(one - usual) for one in known)
        return max(spread, LEAST * abs(usual))

    @property
    def value(self) -> float:
        return median(self._known())

    def _known(self) -> list[float]:
        return [value for value in self._last if value is not None]


class SpikeGuard:
    """Records spikes of the loss and, with the policy ``skip``, keeps spikes of the gradient from the weights.

    On every rank, read ``refuse_above`` before an update and pass in each step's numbers after it.
    """

    def __init__(self, factor: float, policy: Policy = "warn") -> None:
        """``factor``: deviations that make a spike; 0 disables it."""
        self.factor, self.policy = factor, policy
        self.loss, self.norm = RunningMedian(), RunningMedian()

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], factor: float, policy: Policy = "warn"
    ) -> SpikeGuard:
        """The guard as it was after the last of these rows of metrics.jsonl; the last ``WINDOW`` are enough."""
        guard = cls(factor, policy)
        for row in rows:
            guard._add(row["loss"], row["grad_norm"])
        return guard

    def refuse_above(self) -> float:
        """The gradient norm above which an update is refused."""
        return self.norm.above(self.factor) if self.policy == "skip" and self.factor > 0 else math.inf

    def refuses(self, norm: float) -> bool:
        return math.isfinite(norm) and norm > self.refuse_above()

    def judge(self, step: int, loss: float, norm: float) -> dict[str, Any] | None:
        """Take in a step's numbers; returns a row of faults.jsonl if one of them is a spike.

        A norm is reported only if it kept the update back: clipping handles the others.
        """
        far = {"loss": self.loss.deviations(loss), "grad_norm": self.norm.deviations(norm)}
        refused = self.refuses(norm)
        row = None
        if refused or self._spikes(far["loss"]):
            name, value, usual = ("grad_norm", norm, self.norm) if refused else ("loss", loss, self.loss)
            row = {
                "kind": "spike",
                "step": step,
                "of": name,
                "loss": finite(loss),
                "grad_norm": norm,
                "usual": usual.value,
                "deviations": far[name],
                "action": f"{name} {value:.4g}, usually {usual.value:.4g} ({far[name]:.0f} deviations above)"
                f"{'; update skipped' * refused}",
            }
        self._add(loss, norm)
        return row

    def _spikes(self, deviations: float) -> bool:
        return self.factor > 0 and deviations > self.factor

    def _add(self, loss: float | None, norm: float | None) -> None:
        self.loss.add(loss)
        self.norm.add(norm)
