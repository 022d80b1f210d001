"""A gradient that is not finite on one rank: every rank leaves its weights alone, in every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.ranks import run_ranks

from shoal.facts.config.file import load
from shoal.launch.local import prepared
from shoal.parallel.execute import Executor
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job, resolve
from shoal.train.data.collection import Collection
from shoal.train.first_weights import first_weights
from shoal.train.program import Program


def poisoned_step(rank: int, world: int, jobs: list[Job], dataset: Path) -> list[tuple[bool, bool]]:
    """For each job: whether this rank updated its weights, and whether they are what they were."""
    forward_backward = Executor.forward_backward
    seen = []
    for job in jobs:
        mesh = Mesh(job.layout, rank, torch.device("cpu"))
        program = Program(job, Collection.open(dataset), mesh, first_weights(job))
        before = [part.local.clone() for _, part in program.placed.weights]
        batches = [program.loader.rows(1, places) for places in program.positions(1)]
        (targets,) = mesh.hosts.sum_integers([program.own_targets(batches)])
        # The last rank holds the end of every pipeline, the last part of every tensor, the last rows of a batch.
        poison = float("nan") if rank == world - 1 else 1.0
        Executor.forward_backward = (  # type: ignore
            lambda self, batches, factor, scale, poison=poison: forward_backward(
                self, batches, factor * poison, scale
            )
        )
        result = program.step(1, batches, targets)
        after = [part.local for _, part in program.placed.weights]
        same = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        seen.append((result.updated, same))
    return seen


@pytest.mark.parametrize(
    ("layouts", "strict"),
    [
        (["dp=2", "fsdp=2", "fsdp=2,zero=1", "fsdp=2,zero=2", "tp=2", "pp=2", "pp=2,schedule=zb"], False),
        (["dp=2", "fsdp=2", "fsdp=2,zero=1", "pp=2"], True),
    ],
    ids=["plain", "strict"],
)
def test_no_rank_moves(settings: Callable[..., list[str]], layouts: list[str], strict: bool) -> None:
    jobs = [resolve(load(None, settings(run__strict=strict), layout).config) for layout in layouts]
    dataset = prepared(jobs[0].config.data, Console(stderr=True))
    for results in run_ranks(2, poisoned_step, jobs, dataset):
        for layout, (updated, same) in zip(layouts, results, strict=True):
            assert not updated and same, layout
