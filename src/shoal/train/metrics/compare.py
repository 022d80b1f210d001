"""Compare a run's first steps with its plan."""

from __future__ import annotations

from statistics import median
from typing import Any

from shoal.plan.resolve import Job
from shoal.predict.memory import ledgers

# Steps of a process that are compared. The first creates optimizer states and loads kernels; the second may be
# observed.
FIRST, LAST = 3, 6
# Predictions after a calibration are off by less than this.
DRIFT = 0.10


NO_PLAN = "the run has no plan.json that can be read"
SHARED = "ranks share a device, and are predicted as if each had its own"
ON_CPU = (
    "a row has the process's resident set, and what is predicted are tensors: shoal profile compares those"
)


class Comparison:
    """Adds predictions to the first rank's rows and, once, reports how they compared.

    ``plan`` is the content of plan.json. What cannot be compared is named, with the reason.
    """

    def __init__(self, job: Job, plan: dict[str, Any], on_gpu: bool) -> None:
        self.steps = job.config.recipe.steps
        self.rates = plan.get("rates", "")
        # With several ranks, more than the calibrated device decides.
        self.calibrated = plan.get("calibrated") if job.layout.world == 1 else None
        # Predicted times for an uncalibrated CPU are guesses: they are recorded in files but not reported.
        self.told = on_gpu or plan.get("calibrated") is not None
        self.predicted: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        if "step" not in plan:
            self.missing["step_s"] = NO_PLAN
        elif on_gpu and job.layout.world > job.cluster.devices:
            self.missing["step_s"] = SHARED
        else:
            self.predicted["step_s"] = plan["step"]["seconds"]
        if on_gpu:
            # The first rank is in the first stage; the plan's own number is for the fullest stage.
            self.predicted["memory_peak"] = ledgers(job.workload())[0].peak_allocated
        else:
            self.missing["memory_peak"] = ON_CPU
        self._count = 0
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Add predictions to a step's row. Returns the comparison after the last compared step, otherwise None."""
        row.update({f"predicted_{name}": value for name, value in self.predicted.items()})
        self._count += 1
        if not FIRST <= self._count <= LAST:
            return None
        self._rows.append(row)
        if self._count < LAST and row["step"] < self.steps:
            return None
        row["compared"] = self._compared()
        return {"after_step": row["step"], **row["compared"]}

    def _compared(self) -> dict[str, Any]:
        """Errors are predicted over measured, minus one."""
        found: dict[str, Any] = {"steps": len(self._rows), "rates": self.rates, "missing": self.missing}
        found["told"] = self.told
        for name, predicted in self.predicted.items():
            measured = median(row[name] for row in self._rows)
            found |= {
                name: measured,
                f"predicted_{name}": predicted,
                f"{name}_error": predicted / measured - 1,
            }
        if self.calibrated and "step_s" in found:
            longer = found["step_s"] / found["predicted_step_s"] - 1
            if longer > DRIFT:
                found["drift"] = (
                    f"steps take {longer:.0%} longer than the calibration of {self.calibrated[:10]} says: "
                    "run shoal profile --calibrate again, or check whether the device is throttled or shared"
                )
        return found
