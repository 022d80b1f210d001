"""Kernels of a profiled step that are slower than when the device was calibrated.

Two calibrations are compared in ``calibrate/drift.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.predict.time.cost_model import cost_model
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.measured_layer import by_kind
from shoal.predict.workload import Workload

# A run's kernels differ by less from those that were measured one by one.
NOTABLE = 0.10
# Kinds of work that take less of a step than this say little.
LITTLE = 0.02


def of_run(workload: Workload, kinds: Mapping[str, float], seconds: float) -> list[str]:
    """A sentence for each kind of work on which a profiled step spends longer than its calibration says.

    ``kinds``: seconds of the step by kind, as a profile has them. Only of a device that has the run to itself: where
    several ranks share the work, others than the kernels decide.
    """
    on = cost_model(workload)
    if not isinstance(on.kernels, MeasuredKernels) or workload.layout.world > 1 or workload.lora is not None:
        return []
    measured = on.rates.measured
    assert measured is not None
    found = []
    for kind, expected in by_kind(workload, on.kernels).items():
        taken = kinds.get(kind, 0.0)
        if taken > LITTLE * seconds and taken / expected - 1 > NOTABLE:
            found.append(
                f"{kind} {taken / expected - 1:.0%} slower than when calibrated on {measured.date[:10]}: "
                "run shoal profile --calibrate again, or check whether the device is throttled or shared"
            )
    return found
