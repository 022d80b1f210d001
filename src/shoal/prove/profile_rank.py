"""One rank's part of a profile: timed steps, torch's profiler and the memory tracker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from shoal.launch.init_rank import init_rank
from shoal.observe import trace
from shoal.observe.breakdown import TimeBreakdown, breakdown, extents
from shoal.observe.intervals import Interval
from shoal.parallel.mesh import Mesh
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.train.data.collection import Collection
from shoal.train.data.loader import Batch
from shoal.train.first_weights import first_weights
from shoal.train.metrics.meter import Meter
from shoal.train.metrics.observed import Watch, watched
from shoal.train.program import Program
from shoal.train.run_directory import RunDirectory
from shoal.train.scratch_files import open_files

TIMED_STEPS = 5
# The profiler's own start takes time, so it runs for one step before the one that counts. The tracker has one more.
WITH_INSTRUMENTS = 3


@dataclass(frozen=True)
class ProfileRequest:
    """What to profile, and where its files go."""

    job: Job
    dataset: Path
    warm_up: int
    run: RunDirectory


@dataclass(frozen=True)
class RankProfile:
    """One rank's measurements."""

    rank: int
    place: dict[str, int]
    seconds: list[float]  # of each uninstrumented step
    waits: list[float]  # of these, for input
    spent: TimeBreakdown  # of the profiled step
    computations: dict[str, Interval]  # of the schedule, on a clock that the ranks of a machine share
    peak: int  # peak of live tensor bytes
    categories: dict[str, int]  # the peak by category
    moment: str  # when the peak occurred
    traffic: list[dict[str, Any]]
    allocated: int | None = None  # the device allocator's peaks: allocated, reserved
    reserved: int | None = None


def take_part(rank: int, world: int, store: SignedStore, order: ProfileRequest) -> RankProfile:
    """Warm-up steps, timed steps, a profiled and a tracked one: all of them regular steps of the run."""
    # torch's profiler announces its start and stop on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    job = order.job
    mesh = init_rank(job, rank, rank, store)
    files = open_files(job, order.run.path, rank)
    program = Program(job, Collection.open(order.dataset), mesh, first_weights(job), files)
    last = order.warm_up + TIMED_STEPS + WITH_INSTRUMENTS
    program.compute_reference(program.reference(1, last, 0))
    steps = program.loader.steps(1, last, program.positions)
    on_gpu = mesh.device.type == "cuda"
    with closing(steps):
        for _ in range(order.warm_up):
            _timed(program, steps)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(mesh.device)
        times = [_timed(program, steps) for _ in range(TIMED_STEPS)]
        allocated = torch.cuda.max_memory_allocated(mesh.device) if on_gpu else None
        reserved = torch.cuda.max_memory_reserved(mesh.device) if on_gpu else None
        trace_file = order.run.trace(rank)
        _traced(program, steps, trace_file)
        watch = _tracked(program, steps)
    recording = trace.sort_out(trace.read(trace_file), mesh.names, mesh.purposes)
    if on_gpu and not recording.kernels:
        raise RuntimeError(
            "torch's profiler saw no kernel: CUPTI is missing, or another profiler holds the GPU "
            "(nvidia-smi and dmesg know more); fix: end the other one, or allow CUPTI for this user"
        )
    computations = extents(recording)
    seen = RankProfile(
        rank=rank,
        place=mesh.coords,
        seconds=[meter.seconds for meter in times],
        waits=[meter.waited for meter in times],
        spent=breakdown(recording, _pipeline(mesh, computations)),
        computations=computations,
        peak=watch.tracker.peak,
        categories=watch.tracker.peak_by_category(),
        moment=str(watch.tracker.peak_origin),
        traffic=[asdict(row) for row in watch.counter.traffic()],
        allocated=allocated,
        reserved=reserved,
    )
    if files is not None:
        files.close()
    mesh.close()
    return seen


def _timed(program: Program, steps: Iterator[tuple[int, list[Batch]]]) -> Meter:
    """One step as in training, on its own meter."""
    meter = Meter(program.job, program.mesh)
    meter.start()
    with record_function(trace.INPUT):
        step, batches = next(steps)
        targets, _ = program.step.agree(program.own_targets(batches))
    meter.have_input()
    program.step(step, [batch.to(program.mesh.device) for batch in batches], targets)
    meter.stop()
    return meter


def _traced(program: Program, steps: Iterator[tuple[int, list[Batch]]], path: Path) -> None:
    """The second of two steps under the profiler, saved as a trace for Perfetto."""
    activities = [ProfilerActivity.CPU]
    if program.mesh.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # There is only one cycle, but without a schedule torch warns that it would forget others.
    cycle = schedule(wait=0, warmup=1, active=1)
    with profile(activities=activities, schedule=cycle, acc_events=True) as profiler:
        _timed(program, steps)
        profiler.step()
        with record_function(trace.STEP):
            _timed(program, steps)
    profiler.export_chrome_trace(str(path))


def _tracked(program: Program, steps: Iterator[tuple[int, list[Batch]]]) -> Watch:
    """One step with every live byte tracked."""
    device = program.mesh.device
    step, batches = next(steps)
    targets, _ = program.step.agree(program.own_targets(batches))
    batches = [batch.to(device) for batch in batches]
    with watched(program.step, batches, aligned=device.type == "cuda") as watch:
        program.step(step, batches, targets)
    return watch


def _pipeline(mesh: Mesh, computations: dict[str, Interval]) -> Interval | None:
    """From any rank's first computation to the end of the last; None without a pipeline."""
    if mesh.layout.pp == 1:
        return None
    first = min(start for start, _ in computations.values())
    return -mesh.hosts.largest(-first), mesh.hosts.largest(max(end for _, end in computations.values()))
