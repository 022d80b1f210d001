"""What a launcher passes to every worker, including the name of the function to call."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.plan.resolve import Job
from shoal.train.run_directory import ALONE


@dataclass(frozen=True)
class Assignment:
    """The work of one worker; the same for all."""

    entrypoint: str  # "module:function", called with this assignment
    job: Job
    run: Path
    dataset: Path
    secret: bytes = field(repr=False)  # signs values in the launcher's store
    attempt: str  # a name unique among all attempts at the run
    round: int = 1  # the number of this attempt in its launcher
    set_aside: tuple[int, ...] = ()  # steps in memory that must not be resumed from
    node: str = ALONE  # this machine's name among the nodes
    nodes: int = 1  # number of nodes, with equally many ranks each
    bound: bool = False  # each rank sees only its own device


def begin(assignment: Assignment) -> Any:
    """A worker's first line."""
    module, _, function = assignment.entrypoint.partition(":")
    return getattr(importlib.import_module(module), function)(assignment)
