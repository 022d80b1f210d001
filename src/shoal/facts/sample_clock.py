"""The clock of a run: how many samples its steps use, and have used before each."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleClock:
    """``batch`` samples a step; before that, fewer or more of them while ``ramp`` lasts.

    Each stage of the ramp has a batch and the number of samples of the run at which it ends; the step in which that is
    reached is its last. All follows from the step alone, so a resume and another layout find the same samples.
    """

    batch: int
    ramp: tuple[tuple[int, int], ...] = ()

    def at(self, step: int) -> int:
        """The global batch of a step (steps start at 1)."""
        return self._find(step)[0]

    def before(self, step: int) -> int:
        """Samples that were used before a step."""
        batch, first, samples = self._find(step)
        return samples + (step - first) * batch

    def steps_of(self, samples: int) -> int:
        """The first step before which so many samples are used up, less one: steps that use at least so many."""
        steps, used = 0, 0
        for batch, until in (*self.ramp, (self.batch, samples)):
            here = max(0, -(-(min(until, samples) - used) // batch))
            steps, used = steps + here, used + here * batch
        return steps

    def steps_for_epochs(self, epochs: float, samples: int) -> int:
        """Steps that go through so many samples so often."""
        return self.steps_of(math.ceil(epochs * samples))

    def _find(self, step: int) -> tuple[int, int, int]:
        """The batch of a step, the first step that had it, and the samples used before that."""
        first, used = 1, 0
        for batch, until in self.ramp:
            here = max(0, -(-(until - used) // batch))
            if step < first + here:
                return batch, first, used
            first, used = first + here, used + here * batch
        return self.batch, first, used
