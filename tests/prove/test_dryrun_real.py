"""The dry run against real ranks over gloo: the same bytes at the peak, the same collectives, rank by rank."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.predict.counted import ask
from tests.ranks import run_ranks

from shoal.facts.traffic import Traffic
from shoal.models.initial import fill
from shoal.observe.memory import MemoryTracker
from shoal.parallel.mesh import Mesh
from shoal.predict.workload import Workload
from shoal.prove.dryrun import dryrun
from shoal.train.data.loader import Batch
from shoal.train.metrics.observed import watched
from shoal.train.program import assemble, blueprint

# The peak is in the loss in some of them and in a block's backward pass in the others.
LAYOUTS = ["dp=2", "fsdp=2", "fsdp=2,recompute=full", "fsdp=2,zero=2", "tp=2", "pp=2"]
SEQ = 128
# What the issue asks for; on our machines the two were equal to the byte.
NEAR = 0.005

Real = tuple[dict[str, int], list[Traffic]]


def question_of(layout: str) -> Workload:
    shape = {"layers": 4, "hidden": 64, "ffn": 192, "vocab": 256, "head_dim": 8}
    return ask(layout, shape, seq=SEQ, batch=4)


def real(rank: int, world: int, layouts: list[str]) -> list[Real]:
    take_size = MemoryTracker._take_size

    def patiently(tracker: MemoryTracker, followed: Any, size: int) -> None:
        """Gloo's threads need Python's lock to let go of a buffer: before a new peak they are given the time."""
        if tracker._total + size - followed.bytes > tracker._peak:
            time.sleep(0.001)
            tracker._bury()
        take_size(tracker, followed, size)

    with patch.object(MemoryTracker, "_take_size", patiently):
        return [_second_step(question_of(layout), rank) for layout in layouts]


def _second_step(workload: Workload, rank: int) -> Real:
    """All as in ``dryrun``, with values."""
    mesh = Mesh(workload.layout, rank, torch.device("cpu"))
    first = partial(fill, model=workload.model, seed=0)
    network = blueprint(workload.model, workload.recipe)
    step = assemble(network, workload.recipe, workload.tune, mesh, first)
    batches = [_batch(workload) for _ in range(workload.accumulation)]
    step(1, batches[:1], 1)
    gc.collect()
    with watched(step, batches, aligned=False) as watch:
        targets, _ = step.agree(1)
        step(2, batches, targets)
    return watch.tracker.peak_by_category(), watch.counter.traffic()


def _batch(workload: Workload) -> Batch:
    rows = workload.micro
    tokens = torch.arange(rows * SEQ).view(rows, SEQ) % workload.model.vocab
    positions = torch.arange(SEQ).expand(rows, SEQ).contiguous()
    return Batch(tokens, tokens.roll(-1, 1), positions, None, torch.arange(rows), rows * SEQ)


@pytest.fixture(scope="module")
def ranks() -> list[list[Real]]:
    return run_ranks(2, real, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_rank_holds_and_sends_what_its_dry_run_does(layout: str, ranks: list[list[Real]]) -> None:
    for rank, results in enumerate(ranks):
        held, sent = results[LAYOUTS.index(layout)]
        seen = dryrun(question_of(layout), rank)
        peak = seen.memory.peak_allocated
        assert sent == seen.traffic, rank
        assert sum(held.values()) == pytest.approx(peak, rel=NEAR), rank
        held["buffers"] = held.get("buffers", 0) + held.pop("messages", 0)
        for category, size in held.items():
            assert size == pytest.approx(getattr(seen.memory, category), abs=NEAR * peak), (rank, category)
