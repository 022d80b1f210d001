"""Kernels of a profiled step that are slower than when the device was calibrated.

Two calibrations are compared in ``calibrate/drift.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.predict.bench import bench
from shoal.predict.counted import by_kind
from shoal.predict.measured import MeasuredKernels
from shoal.predict.question import Question

# A run's kernels differ by less from those that were measured one by one.
NOTABLE = 0.10
# Kinds of work that take less of a step than this say little.
LITTLE = 0.02


def of_run(question: Question, kinds: Mapping[str, float], seconds: float) -> list[str]:
    """A sentence for each kind of work on which a profiled step spends longer than its calibration says.

    ``kinds``: seconds of the step by kind, as a profile has them. Only of a device that has the run to itself: where
    several ranks share the work, others than the kernels decide.
    """
    on = bench(question)
    if not isinstance(on.kernels, MeasuredKernels) or question.layout.world > 1 or question.lora is not None:
        return []
    measured = on.rates.measured
    assert measured is not None
    found = []
    for kind, expected in by_kind(question, on.kernels).items():
        taken = kinds.get(kind, 0.0)
        if taken > LITTLE * seconds and taken / expected - 1 > NOTABLE:
            found.append(
                f"{kind} {taken / expected - 1:.0%} slower than when calibrated on {measured.date[:10]}: "
                "run shoal profile --calibrate again, or check whether the device is throttled or shared"
            )
    return found
