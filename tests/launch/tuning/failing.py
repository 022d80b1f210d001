"""A rank that fails in one layout, before its first step; what a layout that the machine cannot run looks like."""

from __future__ import annotations

import os
from typing import Any

from shoal.launch import worker
from shoal.launch.assignment import Assignment
from shoal.plan.resolve import Job
from shoal.train.loop import train
from shoal.train.outcome import Outcome

UNABLE = "FSDP does not run here"


def work(assignment: Assignment) -> Outcome | None:
    return worker.work(assignment, main=_train)


def _train(job: Job, *rest: Any) -> Outcome:
    if job.layout.fsdp > 1 and int(os.environ["RANK"]) == 1:
        raise ValueError(UNABLE)
    return train(job, *rest)
