"""What a launcher passes to every worker, including the function to call, by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.plan.resolve import Job
from shoal.train.run_directory import ALONE


@dataclass(frozen=True)
class Assignment:
    """What one worker is to do, all of them alike."""

    entrypoint: str  # "module:function", called with this
    job: Job
    run: Path
    dataset: Path
    secret: bytes = field(repr=False)  # signs what is in the launcher's store
    attempt: str  # a name that no other attempt at the run ever had
    round: int = 1  # which attempt of its launcher's this is
    set_aside: tuple[int, ...] = ()  # steps in memory that it must not continue from
    node: str = ALONE  # what this machine is called among those that take part
    nodes: int = 1  # that take part, with as many ranks each
    bound: bool = False  # each sees a device of its own alone


def begin(assignment: Assignment) -> Any:
    """The first line of a worker."""
    module, _, function = assignment.entrypoint.partition(":")
    return getattr(importlib.import_module(module), function)(assignment)
