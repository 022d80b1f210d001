"""Dry run: the real parallel code of one rank in a world of any size, without hardware, against the prediction.

The network is built, placed and stepped by the training code. Its peak memory and every collective it issues are
counted, and compared line by line with the output of ``predict``.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat

import torch

from shoal.facts.layout import Layout
from shoal.facts.layout.ranks import coordinates, stride
from shoal.facts.ledger import CATEGORIES, PART_OF, Ledger
from shoal.facts.traffic import Traffic
from shoal.launch.local import PRELOAD, warm_workers
from shoal.models.initial import Slice
from shoal.observe.attribution import Attribution
from shoal.observe.collectives import IssuedCall
from shoal.observe.memory import AllocationSite
from shoal.predict.memory import ledger, ledgers
from shoal.predict.memory.device import beside_tensors, on_top
from shoal.predict.memory.inventory import rank_inventories
from shoal.predict.offload_cut import shard_of
from shoal.predict.traffic import traffic
from shoal.predict.workload import Workload
from shoal.prove.balanced_routing import balanced
from shoal.prove.dryrun_findings import FLOOR, Finding, in_memory, in_messages, in_traffic
from shoal.prove.fake_world import SizeOnlyFiles, SumsInPlace, fake_rank, without_data
from shoal.prove.pinned_kernels import pinned
from shoal.train.data.loader import Batch
from shoal.train.metrics.observed import watched
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step


@dataclass(frozen=True)
class DryRun:
    """One rank's step, as counted, beside its prediction."""

    workload: Workload
    rank: int
    memory: Ledger
    predicted: Ledger
    traffic: list[Traffic]
    predicted_traffic: list[Traffic]
    calls: list[IssuedCall]
    places: dict[AllocationSite, int]  # bytes at the peak
    seconds: float

    @property
    def stage(self) -> int:
        return coordinates(self.rank, self.workload.layout)["pp"]

    @property
    def matches(self) -> bool:
        """Whether all traffic is as predicted, to the call and to the byte."""
        return self.traffic == self.predicted_traffic

    @property
    def findings(self) -> list[Finding]:
        """All differences from the prediction that matter."""
        return self.differences(FLOOR)

    def differences(self, floor: int) -> list[Finding]:
        """All differences from the prediction; in memory only those above ``floor`` bytes."""
        return [
            *in_traffic(self.traffic, self.predicted_traffic, self.calls),
            *in_messages(self.workload, self.stage, self.calls),
            *in_memory(self.memory, self.predicted, self.places, floor),
        ]


def first_rank(layout: Layout, stage: int) -> int:
    """The first of a stage's ranks: if things do not divide evenly, it has the larger part."""
    return stage * stride("pp", layout)


def fullest_rank(workload: Workload) -> int:
    """The first rank of the stage that is predicted to need the most memory."""
    return first_rank(workload.layout, ledger(eager(workload)).worst_stage)


def eager(workload: Workload) -> Workload:
    """The workload run eager, as a dry run sees it: a compiler needs the device that kernels are for."""
    return replace(workload, compile=False)


def dryrun(workload: Workload, rank: int) -> DryRun:
    """The second step of one rank, with eager blocks: by then optimizer states and FSDP's buffers exist."""
    workload = eager(workload)
    began = time.perf_counter()
    on_cpu = workload.cluster.device.name == "cpu"
    domain = workload.cluster.apart
    with fake_rank(workload.layout, rank, "gloo" if on_cpu else "nccl", domain) as mesh:
        network = blueprint(workload.network, workload.recipe)
        with without_data(), balanced(), pinned(workload) as kernels:
            step = assemble(network, workload.recipe, workload.tune, mesh, _no_values, files=SizeOnlyFiles())
            batches = [_batch(workload) for _ in range(workload.accumulation)]
            step(1, batches[:1], 1)
            gc.collect()
            # Without allocator rounding, which is negligible in a model that needs a GPU.
            with watched(step, batches, aligned=False, fake=True) as watch, SumsInPlace():
                targets, _ = step.agree(1)
                step(2, batches, targets)
            kernels.check()
    stage = coordinates(rank, workload.layout)["pp"]
    tracker = watch.tracker
    return DryRun(
        workload,
        rank,
        _ledger(workload, stage, tracker.peak_by_category(), tracker.peak_origin, step),
        ledgers(workload, shard_of(workload, rank))[stage],
        watch.counter.traffic(),
        sorted(traffic(workload, rank)),
        watch.counter.calls,
        dict(tracker.peak_by_place()),
        time.perf_counter() - began,
    )


def dryrun_stages(workload: Workload, processes: int, told: Callable[[DryRun], None]) -> list[DryRun]:
    """One rank of every stage, ``processes`` at a time, each in its own process."""
    ranks = [first_rank(workload.layout, stage) for stage in range(workload.layout.pp)]
    # Not forked from here, because torch's threads do not survive a fork: from a server that has imported torch once.
    warm_workers((*PRELOAD, __name__))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver")) as pool:
        found = []
        for seen in pool.map(dryrun, repeat(workload), ranks):
            told(seen)
            found.append(seen)
    return found


def _no_values(slices: list[tuple[str, Slice]]) -> None:
    """Does nothing: there is no memory for values."""


def _batch(workload: Workload) -> Batch:
    rows, length = workload.micro, workload.recipe.seq
    tokens, targets, positions = (torch.zeros(rows, length, dtype=torch.int64) for _ in range(3))
    reference = None
    if workload.recipe.loss_facts.reference:
        reference = torch.zeros(rows, dtype=torch.float64)
    return Batch(tokens, targets, positions, None, torch.arange(rows), rows * length, reference=reference)


def _ledger(
    workload: Workload, stage: int, held: dict[str, int], at: Attribution | None, step: Step
) -> Ledger:
    own = dict.fromkeys(CATEGORIES, 0)
    rank = tuple(rank_inventories(workload))[stage]
    for category, size in (*held.items(), ("buffers", beside_tensors(rank))):
        own[PART_OF.get(category, category)] += size
    peak = sum(own.values())
    band = on_top(workload, peak)
    return Ledger(
        **own,
        peak_allocated=peak,
        reserved=band.reserved,
        device_total=band.total,
        device_p90=band.p90,
        capacity=workload.cluster.device.memory_bytes,
        worst_stage=stage,
        instant=str(at or "between steps"),
        host=step.host_bytes,
        nvme=step.nvme_bytes,
    )
