"""The sample clock of a run: how many samples each step uses, and how many were used before it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleClock:
    """``batch`` samples per step, preceded by fewer or more of them during the ``ramp``.

    Each ramp stage has a batch and the number of samples at which it ends; the step that reaches it is its last.
    Everything follows from the step alone, so a resume or another layout finds the same samples.
    """

    batch: int
    ramp: tuple[tuple[int, int], ...] = ()

    def at(self, step: int) -> int:
        """The global batch of a step (steps start at 1)."""
        return self._find(step)[0]

    def before(self, step: int) -> int:
        """Samples used before a step."""
        batch, first, samples = self._find(step)
        return samples + (step - first) * batch

    def steps_of(self, samples: int) -> int:
        """The number of steps needed to use at least this many samples."""
        steps, used = 0, 0
        for batch, until in (*self.ramp, (self.batch, samples)):
            here = max(0, -(-(min(until, samples) - used) // batch))
            steps, used = steps + here, used + here * batch
        return steps

    def steps_for_epochs(self, epochs: float, samples: int) -> int:
        """The number of steps for this many epochs over ``samples``."""
        return self.steps_of(math.ceil(epochs * samples))

    def _find(self, step: int) -> tuple[int, int, int]:
        """A step's batch, the first step with that batch, and the samples used before that first step."""
        first, used = 1, 0
        for batch, until in self.ramp:
            here = max(0, -(-(until - used) // batch))
            if step < first + here:
                return batch, first, used
            first, used = first + here, used + here * batch
        return self.batch, first, used
