"""Spikes: a loss or gradient norm far above the usual.

What is usual is the median of the last steps, and how far they lie from it the median of that: neither is moved by a
few outliers. Both are a function of the last rows of metrics.jsonl, so a run that was resumed judges as one that was
not; and as losses and norms are the whole batch's, every rank judges alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Literal

from shoal.train.metrics.meter import finite

# Steps that are looked back on, and those there must be before anything is judged.
WINDOW = 64
FEWEST = 16
# The median distance of normally distributed numbers from their median, times this, is their standard deviation.
OF_NORMAL = 1.4826
# A deviation is at least this share of what is usual: numbers that hardly differ make nothing of a small difference.
LEAST = 0.01

Policy = Literal["warn", "skip"]


class Usual:
    """One number of the last steps."""

    def __init__(self) -> None:
        self._last: deque[float | None] = deque(maxlen=WINDOW)

    def add(self, value: float | None) -> None:
        """None, as metrics.jsonl has it, where it was not finite, which is another guard's business."""
        # The outliers too: the window is then made of the last rows alone, and a new level becomes the usual one.
        self._last.append(finite(value))

    def deviations(self, value: float) -> float:
        """How many robust standard deviations a value lies above the median; 0 where there is too little to tell."""
        unit = self._deviation()
        return (value - self.value) / unit if unit and math.isfinite(value) else 0.0

    def above(self, deviations: float) -> float:
        """The value that lies so many above the median; infinity where there is too little to tell."""
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
    """Notes spikes of the loss and, with the policy ``skip``, keeps those of the gradient from the weights.

    To be asked ``refuse_above`` before an update and told each step's numbers after it, on every rank.
    """

    def __init__(self, factor: float, policy: Policy = "warn") -> None:
        """``factor``: deviations that make a spike; 0: nothing is one."""
        self.factor, self.policy = factor, policy
        self.loss, self.norm = Usual(), Usual()

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], factor: float, policy: Policy = "warn"
    ) -> SpikeGuard:
        """As it stood after the last of these rows of metrics.jsonl; the last ``WINDOW`` are enough."""
        guard = cls(factor, policy)
        for row in rows:
            guard._add(row["loss"], row["grad_norm"])
        return guard

    def refuse_above(self) -> float:
        """The norm of the gradient above which it should not reach the weights."""
        return self.norm.above(self.factor) if self.policy == "skip" and self.factor > 0 else math.inf

    def refuses(self, norm: float) -> bool:
        return math.isfinite(norm) and norm > self.refuse_above()

    def judge(self, step: int, loss: float, norm: float) -> dict[str, Any] | None:
        """Take a step's numbers in; a row of faults.jsonl where one of them is a spike.

        A norm is only told of where it kept the update back: clipping answers the others.
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
