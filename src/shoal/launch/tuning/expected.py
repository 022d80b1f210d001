"""What a search expects of its layouts, from the plan and earlier searches; and what it records for later ones.

No torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from statistics import median

from shoal.facts.calibration import file
from shoal.facts.calibration.steps import MeasuredStep, StoredSteps, known, work_of
from shoal.launch.tuning.trials import Trial, Trials
from shoal.plan.judge import judge
from shoal.plan.resolve import Job
from shoal.train.files import private_files, replace_text

# How much a step in the same layout may differ between runs on the same machine, as a fraction.
OF_ANOTHER_RUN = 0.1


def known_steps(job: Job) -> dict[str, MeasuredStep]:
    """What earlier searches measured for the same work, by layout, fastest first."""
    return known(job.cluster.device.name, _work(job))


def expected(jobs: Sequence[Job]) -> list[Trial]:
    """Earlier measurements are expected again; predictions are corrected by their error there."""
    before = known_steps(jobs[0])
    off = median(one.seconds / one.predicted for one in before.values()) if before else 1.0
    found = []
    for job in jobs:
        name, plan = str(job.layout), judge(job.workload())
        if name in before:
            found.append(Trial(name, before[name].seconds, OF_ANOTHER_RUN, planned=plan.step.seconds))
        else:
            found.append(Trial(name, plan.step.seconds * off, plan.error_bar, planned=plan.step.seconds))
    return found


def remember(job: Job, trials: Trials) -> None:
    """Record measurements for later searches. A full disk records nothing, and ends no run."""
    device, now = job.cluster.device.name, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    steps = [
        MeasuredStep(
            work=_work(job),
            model=job.model.name,
            cluster=str(job.cluster),
            layout=name,
            seconds=belief.seconds,
            predicted=trials.of[name].planned,
            samples=len(trials.of[name].samples),
            date=now,
        )
        for name, belief in trials.measured.items()
    ]
    path = file.steps_file(file.default_folder(), device)
    try:
        before = file.read_steps(path)
    except ValueError:  # missing or unusable: replace it
        before = StoredSteps(format=file.FORMAT, device=device)
    with contextlib.suppress(OSError), private_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, before.with_more(steps).model_dump_json(indent=1) + "\n")


def _work(job: Job) -> str:
    config = job.config
    more = {
        "tune": config.tune.model_dump(mode="json", exclude={"search"}),
        "lora": config.model.lora.model_dump(mode="json") if config.model.lora is not None else None,
        "compile": config.compile.enabled,
        "strict": config.run.strict,
        "packing": config.data.packing,
        "share": config.cluster.share,
    }
    return work_of(job.model, job.cluster, config.recipe, more)
