"""Out of memory: the ledger beside what was measured, and a change that fits; from a real allocation that fails."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pytest
import torch
from tests.conftest import Train
from tests.ranks import run_ranks
from torch.distributed import DistBackendError

from shoal.facts.config.file import load
from shoal.facts.ledger import Ledger
from shoal.launch.report import FAILED
from shoal.plan.judge import judge
from shoal.plan.resolve import Job, resolve
from shoal.predict.memory import ledger
from shoal.predict.workload import Workload
from shoal.train.guard.out_of_memory import GIB, MeasuredMemory, is_out_of_memory, measure, nearest, verdict

# As torch 2.11 words it; numbers from no run.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.12 GiB is "
    "free. Process 812 has 3.00 GiB memory in use. Including non-PyTorch memory, this process has 74.99 GiB memory in "
    "use. Of the allocated memory 70.01 GiB is allocated by PyTorch, and 3.02 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def job_of(layout: str, compile: bool = True, **recipe: object) -> Job:
    values = {"seq": 8192, "batch": 64, "precision": "bf16", **recipe}
    compiled = f"compile.enabled={str(compile).lower()}"
    sets = [
        compiled,
        "cluster.on=8xH100",
        "model.preset=llama3-8b",
        *(f"recipe.{k}={v}" for k, v in values.items()),
    ]
    return resolve(load(None, sets, layout).config)


def ledger_of(job: Job) -> Ledger:
    return ledger(job.workload())


def test_a_remedy_is_of_the_blocks_that_run() -> None:
    """Eager ones hold more: what fits compiled may not fit them."""
    job = job_of("fsdp=8,micro=4", compile=False, seq=6144)
    foreseen = ledger_of(job)
    measured = MeasuredMemory(0, 0, 0, GIB, foreseen.capacity, foreseen.capacity, foreseen.capacity)
    found = nearest(job, foreseen, measured)
    assert found is not None and not found.plan.workload.compiled
    assert found.plan.layout == job.layout.replace(micro=1)


def test_the_allocators_words_are_read() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    # What other parts of CUDA say, which have no type of their own for it.
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"))
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    assert is_out_of_memory(DistBackendError("Last error:\nCuda failure 2 'out of memory'"))
    found = measure(None, CUDA)
    assert found.asked == round(2.5 * GIB) and found.allocated == round(70.01 * GIB)
    assert found.reserved == round(70.01 * GIB) + round(3.02 * GIB)
    # What the other process has is not ours to plan with.
    assert found.capacity == pytest.approx(76.11 * GIB, abs=GIB / 50)
    limited = measure(None, CUDA.replace("Of the", "40.00 GiB allowed; Of the"))
    assert limited.capacity == 40 * GIB


def test_the_verdict_sets_the_ledger_beside_what_was_there_and_names_a_change_that_fits() -> None:
    job = job_of("fsdp=8,micro=4", seq=6144)
    foreseen = ledger_of(job)
    full = foreseen.capacity
    assert not foreseen.fits
    measured = MeasuredMemory(
        foreseen.params, 0, foreseen.optimizer, GIB, full - 2 * GIB, full - GIB // 2, full
    )
    text = verdict(job, foreseen, measured)
    lines = {line[:34].strip(): line[34:].split() for line in text.splitlines()}
    assert text.startswith(f"out of memory: tried to allocate another 1.00 GiB of {full / GIB:.2f} GiB\n")
    assert lines["parameters"] == [f"{foreseen.params / GIB:.2f}"] * 2
    assert lines["gradients"] == [f"{foreseen.grads / GIB:.2f}", "0.00"]
    assert lines["all tensors"][1] == f"{full / GIB - 2:.2f}"
    rest = measured.allocated - foreseen.params - foreseen.optimizer
    assert lines["activations, logits, buffers"][1] == f"{rest / GIB:.2f}"
    found = nearest(job, foreseen, measured)
    assert (
        found is not None and f"fix: nearest change that is predicted to fit: {found}; a step takes " in text
    )
    # One policy changed, and it fits.
    assert found.plan.layout == job.layout.replace(micro=2) and found.plan.fits
    assert "more was needed than predicted" not in text


def test_the_cost_of_a_change_is_told() -> None:
    """Computing the activations again takes longer, by as much as the planner says."""
    job = job_of("fsdp=8,micro=1,recompute=selective", seq=65536)
    foreseen = ledger_of(job)
    assert not foreseen.fits
    full = foreseen.capacity
    measured = MeasuredMemory(
        foreseen.params, 0, foreseen.optimizer, GIB, full - GIB, full, full, full - GIB, full
    )
    text = verdict(job, foreseen, measured)
    found = nearest(job, foreseen, measured)
    assert found is not None
    before = judge(Workload(job.model, job.cluster, job.config.recipe, job.layout)).step.seconds
    assert f"a step takes {found.plan.step.seconds / before - 1:.1%} longer" in text
    assert f"peak so far: tensors {(full - GIB) / GIB:.2f} GiB" in text


def test_a_prediction_that_was_too_low_is_not_believed_again() -> None:
    """It said that this fits. A fifth more was needed, so what fits by less than that is not proposed."""
    job = job_of("fsdp=8,micro=1", seq=6144)
    foreseen = ledger_of(job)
    assert foreseen.fits
    full = foreseen.capacity
    measured = MeasuredMemory(
        foreseen.params, 0, foreseen.optimizer, GIB, int(1.2 * foreseen.peak_allocated), full, full
    )
    found = nearest(job, foreseen, measured)
    assert found is not None
    assert "the run needs at least 1.2" in verdict(job, foreseen, measured)
    assert found.plan.memory.device_total * 1.2 < full
    assert found.plan.memory.peak_allocated < foreseen.peak_allocated


def _nothing(rank: int, world: int) -> None: ...


@contextmanager
def little_room(extra: int) -> Iterator[None]:
    """Workers, which are forked from the server, may have this many bytes more than it has."""
    run_ranks(1, _nothing)  # by then it has imported all that it is to import
    server = _forkserver._forkserver_pid
    pages = int(Path(f"/proc/{server}/statm").read_text().split()[0])
    before = resource.prlimit(server, resource.RLIMIT_AS)
    resource.prlimit(server, resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, before[1]))
    try:
        yield
    finally:
        resource.prlimit(server, resource.RLIMIT_AS, before)


def test_a_run_that_finds_no_room_says_what_to_change(train: Train) -> None:
    with little_room(400 * 2**20):
        run = train(recipe__batch=2**13, recipe__steps=2)
    assert run.report.code == FAILED
    message = run.report.message
    assert message.startswith("rank 0 failed: out of memory: ") and "Traceback" not in message
    assert "parameters" in message and "nearest change that is predicted to fit: micro=" in message
    (row,) = [json.loads(line) for line in run.directory.faults.read_text().splitlines()]
    assert (row["kind"], row["rank"], row["step"]) == ("oom", 0, 1)
    assert row["measured"]["params"] == row["predicted"]["params"] > 0
    assert row["measured"]["resident"] > row["measured"]["params"]
    assert "resident set of this process" in message
    assert "Traceback" in run.directory.log(0).read_text()


def test_on_two_ranks_the_one_without_room_is_named(train: Train) -> None:
    with little_room(700 * 2**20):
        run = train(layout="dp=2", recipe__batch=2**14, recipe__steps=2)
    assert run.report.code == FAILED
    assert ": out of memory: " in run.report.message
