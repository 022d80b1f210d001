"""Kernels of a profiled step that are slower than when the device was calibrated.

``calibrate/drift.py`` compares two calibrations.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.predict.time.cost_model import cost_model
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.measured_layer import by_kind
from shoal.predict.workload import Workload

# A run's kernels differ by less than this from those measured in isolation.
NOTABLE = 0.10
# Kinds of work below this fraction of a step are not reported.
LITTLE = 0.02


def of_run(workload: Workload, kinds: Mapping[str, float], seconds: float) -> list[str]:
    """A sentence for each kind of work that takes longer in the profiled step than the calibration says.

    ``kinds``: seconds of the step by kind, from a profile. Only valid on a device that the run has to itself: where
    several ranks share one, more than the kernels decides.
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
