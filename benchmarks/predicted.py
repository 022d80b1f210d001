"""Steps measured on a GPU, for predictions to be held against: one rank, and ranks that share the GPU.

``python benchmarks/predicted.py SET [FIRST [LAST]]``, SET one of alone, shared, blind, axes, families, fresh, unseen,
and of the last three compiled too (families-compiled): a row a case in ``results/predicted.jsonl``, with the peak of
allocated bytes of every rank and the step's seconds; FIRST and LAST are the numbers of the first and the last case.
Ranks that share a GPU have the memory of others, but not their speed. ``python benchmarks/predicted.py say SET`` writes
down, without a GPU, what is predicted of a set before it is measured (``results/said.jsonl``); its rows then carry that
along. Nothing that predicts reads these rows; ``benchmarks/accuracy.py`` sets them beside the prediction.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import RESULTS, commit, record

from shoal.facts.calibration import file
from shoal.facts.cluster.notation import find
from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.launch import local
from shoal.launch.init_rank import init_rank
from shoal.launch.ranks import RankFailed, run_ranks
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.predict.memory import ledgers
from shoal.predict.time.step import step as step_time
from shoal.predict.workload import Workload
from shoal.train.data.loader import Batch
from shoal.train.first_weights import first_weights
from shoal.train.program import BACKEND, assemble, blueprint
from shoal.train.step import IssuedStep, Step

# Long enough that clocks are those of a long run.
WARM_SECONDS = 2.0
TIMED_SECONDS = 3.0
FEWEST_STEPS = 5
# Graphs that are compiled at the same time, before any is measured: one takes about twenty seconds on a core or two.
AT_ONCE = 6
SAID = RESULTS / "said.jsonl"
CALIBRATIONS = Path(__file__).parent / "data" / "calibration"


@dataclass(frozen=True)
class Case:
    """A layout of a model, and how it is trained."""

    model: str
    layout: str
    seq: int
    batch: int
    recipe: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # to the model
    compiled: bool = False

    def job(self) -> Job:
        values = {
            "precision": "bf16",
            "lr": 1e-4,
            **self.recipe,
            "seq": self.seq,
            "batch": self.batch,
            "steps": 100,
        }
        config = Config.model_validate(
            {
                "recipe": values,
                "layout": self.layout,
                "cluster": {"share": True},
                "fault": {"timeout": 120},
                "compile": {"enabled": self.compiled},
            }
        )
        model = PRESETS[self.model].model_copy(update=self.changes)
        return Job(config, model, find("local"), Layout.parse(self.layout))

    def workload(self, cluster: str) -> Workload:
        """The same, for a prediction."""
        job = self.job()
        return Workload(job.model, find(cluster), job.config.recipe, job.layout, compile=self.compiled)


SMALL, LARGE = "llama3.2-1b", "llama3-8b"
HALF = {"states": "bf16"}
ALONE = (
    *(Case(SMALL, f"micro={micro}", 4096, micro) for micro in (1, 2, 4, 8)),
    Case(SMALL, "micro=16", 512, 16),
    Case(SMALL, "micro=4", 1024, 4),
    Case(SMALL, "micro=8", 2048, 8),
    Case(SMALL, "micro=16", 2048, 16),
    Case(SMALL, "micro=2", 8192, 2),
    Case(SMALL, "micro=1", 16384, 1),
    Case(SMALL, "micro=8,recompute=full", 4096, 8),
    Case(SMALL, "micro=4,recompute=full", 2048, 4),
    Case(SMALL, "micro=2,recompute=full", 8192, 2),
    Case(SMALL, "micro=8,recompute=selective", 4096, 8),
    Case(SMALL, "micro=4,recompute=selective", 2048, 4),
    Case(SMALL, "micro=2", 2048, 2, {"precision": "fp32"}),
    Case(SMALL, "micro=1", 4096, 1, {"precision": "fp32"}),
    Case(SMALL, "micro=4,recompute=full", 1024, 4, {"precision": "fp32"}),
    Case(SMALL, "micro=4", 4096, 4, HALF),
    Case(SMALL, "micro=8,recompute=selective", 2048, 8, HALF),
    Case(SMALL, "micro=4", 4096, 4, changes={"tied": False}),
    Case(SMALL, "micro=8,recompute=full", 2048, 8, changes={"tied": False}),
    Case(SMALL, "micro=2", 4096, 8),
    Case(SMALL, "micro=1", 2048, 4),
    Case(LARGE, "micro=1", 4096, 1, HALF),
    Case(LARGE, "micro=2", 2048, 2, HALF),
    Case(LARGE, "micro=4", 1024, 4, HALF),
    Case(LARGE, "micro=1", 8192, 1, HALF),
    Case(LARGE, "micro=1", 2048, 4, HALF),
    Case(LARGE, "micro=2,recompute=full", 4096, 2, HALF),
    Case(LARGE, "micro=8,recompute=full", 2048, 8, HALF),
    Case(LARGE, "micro=1,recompute=full", 8192, 2, HALF),
    Case(LARGE, "micro=2,recompute=selective", 2048, 2, HALF),
    Case(LARGE, "micro=1,recompute=selective", 4096, 1, HALF),
)
SHARED = (
    Case(SMALL, "fsdp=2,micro=2", 2048, 4),
    Case(SMALL, "fsdp=4,micro=1,recompute=full", 2048, 4),
    Case(SMALL, "fsdp=2,zero=1,micro=2", 2048, 4),
    Case(SMALL, "fsdp=2,zero=2,micro=1", 2048, 4),
    Case(SMALL, "dp=2,fsdp=2,micro=1", 2048, 4),
    Case(SMALL, "tp=2,micro=2", 2048, 2),
    Case(SMALL, "tp=4,micro=2,recompute=selective", 2048, 2),
    Case(SMALL, "tp=2,sp=0,micro=2", 2048, 2),
    Case(SMALL, "pp=2,micro=1", 2048, 4),
    Case(SMALL, "pp=2,schedule=zbv,micro=1", 2048, 4),
    Case(SMALL, "pp=4,schedule=interleaved,micro=1", 2048, 4),
    Case(SMALL, "fsdp=2,tp=2,micro=2", 2048, 4),
    Case(SMALL, "fsdp=2,pp=2,micro=1", 2048, 8),
    Case(SMALL, "tp=2,pp=2,micro=1,recompute=full", 2048, 4),
    Case(LARGE, "tp=2,micro=1,recompute=full", 2048, 1, HALF),
    # Replicas of shards that sum in another precision than they keep gradients in, in one pass and in several.
    Case("llama2-7b", "dp=2,fsdp=2,micro=1,recompute=full", 2048, 4, HALF, {"layers": 8}),
    Case("llama2-7b", "dp=2,fsdp=2,micro=1,recompute=full", 2048, 12, HALF, {"layers": 8}),
    # A window, which attention is shown as a mask.
    Case("mistral-7b", "fsdp=2,micro=1", 8192, 2, HALF, {"layers": 4}),
    Case("mistral-7b", "fsdp=2,tp=2,micro=1,recompute=full", 8192, 2, HALF, {"layers": 4}),
)

# Measured for the first time when nothing that predicts was changed any more.
BLIND = (
    Case(LARGE, "micro=1", 4096, 1, HALF, {"tied": True}),
    Case(LARGE, "micro=1,recompute=full", 2048, 1, {"optimizer": "sgd"}),
    Case(SMALL, "micro=3", 3072, 3),
    Case(SMALL, "micro=6,recompute=selective", 1536, 12, changes={"tied": False}),
    Case(SMALL, "micro=5,recompute=full", 2560, 5, {"precision": "fp32"}, {"layers": 12}),
    Case(LARGE, "micro=3", 1536, 3, HALF, {"layers": 24}),
    Case(LARGE, "micro=4,recompute=selective", 2048, 4, changes={"layers": 16}),
    Case(SMALL, "dp=2,micro=1", 2048, 4),
    Case(SMALL, "fsdp=4,unit=2,micro=1", 2048, 4, changes={"tied": False}),
    Case(SMALL, "fsdp=2,zero=1,tp=2,micro=1", 2048, 4),
    Case(SMALL, "fsdp=2,tp=2,micro=3,recompute=full", 2048, 6),
    Case(SMALL, "pp=2,schedule=dualpipev,micro=1", 2048, 4),
    Case(SMALL, "pp=2,schedule=zb,micro=2,recompute=selective", 1024, 8),
    Case(SMALL, "pp=4,micro=1", 2048, 8, changes={"tied": False}),
    Case(SMALL, "tp=4,sp=0,micro=3", 1024, 3),
    Case(SMALL, "tp=2,pp=2,micro=2", 1024, 8),
)

# Six families, eager and compiled, chosen before any of them was measured; nothing was fitted on them.
FAMILIES = (
    Case("gpt2-xl", "micro=8", 1024, 8),
    Case("gpt2-xl", "micro=4", 1024, 8, {"dropout": 0.1}),
    Case("gpt2-xl", "micro=4,recompute=selective", 1024, 4, {"precision": "fp16"}),
    Case("gpt2", "micro=16", 1024, 16, {"precision": "fp32"}),
    Case("mistral-7b", "micro=1", 16384, 1, changes={"layers": 8}),
    Case("mistral-7b", "micro=4,recompute=full", 2048, 4, changes={"layers": 12}),
    Case("qwen2-7b", "micro=2", 4096, 2, changes={"layers": 8}),
    Case("qwen2-7b", "micro=4,recompute=selective", 2048, 4, HALF, {"layers": 10}),
    Case("qwen3-8b", "micro=2", 4096, 2, changes={"layers": 10}),
    Case("qwen3-8b", "micro=1,recompute=full", 8192, 1, changes={"layers": 12}),
    Case("pythia-6.9b", "micro=4", 2048, 4, changes={"layers": 10}),
    Case("pythia-6.9b", "micro=2,recompute=selective", 2048, 6, changes={"layers": 12}),
    Case("llama2-7b", "micro=2", 4096, 2, changes={"layers": 10}),
    Case("llama2-13b", "micro=4", 2048, 4, HALF, {"layers": 6}),
)

# Other cases of the same families, eager and compiled. What was wrong with the predictions of ``FAMILIES`` is known and
# mended: these were chosen, and predicted, afterwards, before any of them was measured.
FRESH = (
    Case("gpt2-xl", "micro=6", 1024, 6),
    Case("mistral-7b", "micro=1", 8192, 1, changes={"layers": 10}),
    Case("qwen2-7b", "micro=4,recompute=full", 2048, 4, changes={"layers": 8}),
    Case("qwen3-8b", "micro=4", 2048, 4, changes={"layers": 8}),
    Case("pythia-6.9b", "micro=2", 2048, 4, changes={"layers": 10}),
    Case("llama2-7b", "micro=4,recompute=selective", 2048, 4, changes={"layers": 10}),
    Case("gpt2", "micro=8", 1024, 8, {"precision": "fp32"}),
    Case("llama2-13b", "micro=2", 4096, 2, HALF, {"layers": 6}),
    Case("qwen2-7b", "micro=1", 8192, 2, HALF, {"layers": 8}),
    Case("pythia-6.9b", "micro=8,recompute=full", 2048, 8, HALF, {"layers": 12}),
    Case("gpt2-xl", "micro=8", 1024, 8, {"precision": "fp16"}, {"layers": 24}),
    Case("gpt2-xl", "micro=8", 1024, 8, {"dropout": 0.1}, {"layers": 24}),
)

# Of widths that nothing was measured of before, eager and compiled; chosen and predicted on a machine without a GPU.
UNSEEN = (
    Case("gpt-neox-20b", "micro=2", 2048, 2, changes={"layers": 6}),
    Case("gpt-neox-20b", "micro=4,recompute=full", 2048, 8, HALF, {"layers": 8}),
    Case("qwen2.5-14b", "micro=1", 4096, 2, changes={"layers": 6}),
    Case("qwen2.5-14b", "micro=4,recompute=selective", 1024, 4, HALF, {"layers": 8}),
    Case("qwen3-32b", "micro=1", 4096, 1, HALF, {"layers": 6}),
    Case("qwen3-32b", "micro=2,recompute=full", 2048, 4, changes={"layers": 4}),
    Case("mistral-7b", "micro=2", 3072, 6, changes={"layers": 8}),
    Case("mistral-7b", "micro=1,recompute=selective", 12288, 1, HALF, {"layers": 12}),
    Case("gpt3-175b", "micro=2", 2048, 2, HALF, {"layers": 2}),
    Case("gpt2", "micro=32", 512, 32, {"dropout": 0.1}),
    Case("llama3-70b", "micro=1", 8192, 1, HALF, {"layers": 3}),
    Case("llama2-13b", "micro=3", 1536, 3, {"precision": "fp16"}, {"layers": 8}),
)

# Sequences and experts that ranks share out.
AXES = (
    Case(SMALL, "cp=2,micro=1", 8192, 1),
    Case(SMALL, "cp=2,cp_kind=ulysses,micro=1", 8192, 1),
    Case("qwen3-30b-a3b", "dp=2,ep=2,micro=1", 2048, 2, HALF, {"layers": 4}),
    Case("mixtral-8x7b", "fsdp=2,ep=2,micro=1", 2048, 2, HALF, {"layers": 2}),
)


@dataclass(frozen=True)
class Measured:
    """Of one rank."""

    peak: int
    reserved: int
    step_s: float
    steps: int


def begin(rank: int, store: dist.Store, case: Case) -> tuple[Mesh, Step, Callable[[], float]]:
    """A rank's step, and what takes one as training does, on random tokens; a first one is done."""
    job = case.job()
    mesh = init_rank(job, rank, rank, store)
    recipe = job.config.recipe
    network = blueprint(job.model, recipe)
    compile_with = BACKEND if job.compilation.on else None
    step = assemble(network, recipe, job.config.tune, mesh, first_weights(job), compile_with=compile_with)
    workload = Workload(job.model, job.cluster, recipe, job.layout)
    batches = [_batch(workload, mesh.device) for _ in range(workload.accumulation)]
    mine = sum(batch.count for batch in batches) if mesh.first_of_replica else 0
    numbers = iter(range(1, 10**6))

    under_way: IssuedStep | None = None

    def seconds() -> float:
        """Of a step, as training takes it: issued before the last one's numbers are read, but for a loss scale."""
        nonlocal under_way
        began = time.perf_counter()
        targets, _ = step.agree(mine)
        before, under_way = under_way, step.issue(next(numbers), batches, targets)
        if step.scale.enabled:
            before, under_way = under_way, None
        if before is not None:
            before.read()
        return time.perf_counter() - began

    seconds()
    if compile_with and step.placed.compiled.problem:
        raise RuntimeError(f"not compiled: {step.placed.compiled.problem}")
    return mesh, step, seconds


def compile_ahead(rank: int, world: int, store: dist.Store, case: Case) -> float:
    """The case's graph, which all layers share, with one layer and a small vocabulary; how long that took."""
    small = {**case.changes, "layers": 1, "vocab": 1024, "window_layers": None}
    mesh, step, seconds = begin(rank, store, replace(case, changes=small))
    seconds()
    torch.cuda.synchronize()
    mesh.close()
    return step.placed.compiled.seconds


def measure(rank: int, world: int, store: dist.Store, case: Case) -> Measured:
    """One rank's steps."""
    mesh, _, seconds = begin(rank, store, case)
    seconds()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        seconds()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    taken = [] if world > 1 else list(_timed(seconds))
    mesh.close()
    return Measured(peak, reserved, statistics.median(taken) if taken else 0.0, len(taken))


def _timed(seconds: Any) -> Iterator[float]:
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        seconds()
    end, count = time.perf_counter() + TIMED_SECONDS, 0
    while time.perf_counter() < end or count < FEWEST_STEPS:
        yield seconds()
        count += 1


def _batch(workload: Workload, device: torch.device) -> Batch:
    rows, length = workload.micro, workload.recipe.seq
    tokens = torch.randint(workload.model.vocab, (rows, length + 1), device=device)
    positions = torch.arange(length, device=device).repeat(rows, 1)
    return Batch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        positions,
        None,
        torch.arange(rows),
        rows * length,
    )


def key_of(case: Case) -> str:
    return json.dumps(asdict(case), sort_keys=True)


def say(cases: Sequence[Case]) -> None:
    """Add what is predicted of these cases to the file."""
    if warnings := file.use(CALIBRATIONS):
        raise ValueError("; ".join(warnings))
    with SAID.open("a", encoding="utf-8") as out:
        for case in cases:
            workload = case.workload("1x1xH200")
            peak = max(one.peak_allocated for one in ledgers(workload))
            said = {"commit": commit(), "peak": peak, "step_s": step_time(workload).seconds}
            out.write(json.dumps({"case": asdict(case), "said": said}) + "\n")


def said_of(case: Case) -> dict[str, Any]:
    """As the last line about the case has it."""
    lines = SAID.read_text(encoding="utf-8").splitlines() if SAID.exists() else []
    found = [
        one["said"]
        for one in map(json.loads, lines)
        if json.dumps(one["case"], sort_keys=True) == key_of(case)
    ]
    return {"said": found[-1]} if found else {}


def compiled(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(replace(case, compiled=True) for case in cases)


def main() -> None:
    kinds = {"alone": ALONE, "shared": SHARED, "blind": BLIND, "axes": AXES}
    for name, cases in (("families", FAMILIES), ("fresh", FRESH), ("unseen", UNSEEN)):
        kinds[name], kinds[f"{name}-compiled"] = cases, compiled(cases)
    if sys.argv[1:2] == ["say"] and len(sys.argv) == 3 and sys.argv[2] in kinds:
        say(kinds[sys.argv[2]])
        return
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    local.warm_workers((*local.PRELOAD, "shoal.launch.init_rank"))
    first, last = (int(sys.argv[place]) if len(sys.argv) > place else None for place in (2, 3))
    cases = kinds[sys.argv[1]][first : None if last is None else last + 1]
    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ahead = [pool.submit(run_ranks, 1, compile_ahead, (case,), 200.0) for case in cases if case.compiled]
    for done in ahead:
        if (problem := done.exception()) is not None:
            print(f"not compiled ahead: {problem}", flush=True)
    print(f"{len(ahead)} graphs in {time.perf_counter() - began:.0f} s", flush=True)
    for case in cases:
        world = Layout.parse(case.layout).world
        try:
            ranks = run_ranks(world, measure, (case,), 200.0)
        except RankFailed as failure:
            print(f"{case}: {failure}\n{failure.text[-1500:]}", flush=True)
            continue
        kind = "alone" if world == 1 else "shared"
        measured = [asdict(one) for one in ranks]
        record(
            "predicted",
            kind=kind,
            blind=sys.argv[1] not in ("alone", "shared"),
            **asdict(case),
            ranks=measured,
            **said_of(case),
        )


if __name__ == "__main__":
    main()
