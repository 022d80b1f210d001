"""The result of a step benchmark: medians, ratios with confidence intervals, and whether all trained the same."""

from __future__ import annotations

import os
import platform
import random
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from shoal import __version__
from shoal.facts.model.parameters import parameter_count
from shoal.launch.manifest import git_commit
from shoal.plan.resolve import Job
from shoal.predict.flops import flops_per_token
from shoal.prove.bench.registry import LeftOut

SHOAL = "shoal"
RESAMPLES = 10_000
# How far the warm-up losses may differ, relative to their size, from the same weights on the same rows.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3, "fp8": 2e-2}


@dataclass
class PeerResult:
    """One peer's measurements so far."""

    name: str
    what: str
    versions: dict[str, str]
    rounds: list[list[float]] = field(default_factory=list)  # seconds of each step, round by round
    losses: list[float] = field(default_factory=list)  # of warm-up steps
    peak_allocated: int | None = None  # bytes on the fullest rank; None on a CPU
    peak_reserved: int | None = None
    peak_resident: int | None = None  # of host memory, libraries included
    setup_s: float | None = None  # until the first warm-up was over: building, compiling
    failure: str | None = None
    traceback: str | None = None
    # Processor seconds of each step, round by round.
    processor: list[list[float]] = field(default_factory=list)
    all_losses: list[float] = field(default_factory=list)  # of every step until the last turn's end

    def add(self, reports: list[dict[str, Any]], settling: int) -> None:
        """Add a turn without its first ``settling`` steps: the first rank's times, the fullest rank's memory."""
        self.rounds.append(reports[0]["step_s"][settling:])
        self.processor.append(reports[0]["processor_s"][settling:])
        self.all_losses = reports[0]["losses"]
        for name in ("peak_allocated", "peak_reserved", "peak_resident"):
            seen = [report[name] for report in reports if report[name] is not None]
            if seen:
                setattr(self, name, max(*seen, getattr(self, name) or 0))

    @property
    def medians(self) -> list[float]:
        """Median seconds per step, one for each round."""
        return [median(steps) for steps in self.rounds]

    @property
    def step_s(self) -> float:
        return median(self.medians)


@dataclass(frozen=True)
class StepBench:
    """All peers' turns on one machine."""

    job: Job
    results: list[PeerResult]
    rounds: int
    steps: int
    warm_up: int
    together: bool  # whether all peers stayed in memory between turns
    left_out: tuple[LeftOut, ...] = ()

    @property
    def measured(self) -> list[PeerResult]:
        return [result for result in self.results if result.failure is None]

    @property
    def ok(self) -> bool:
        """Whether Shoal ran: a peer's failure is a result, a failure of Shoal is not."""
        failed = [result.name for result in self.results if result.failure is not None]
        return bool(self.measured) and SHOAL not in failed

    @property
    def how(self) -> str:
        """The setup in one sentence."""
        between = (
            "all stayed in memory between their turns"
            if self.together
            else "each was started anew for every turn, since not all fit into memory together"
        )
        turns = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return (
            f"{turns} of {self.steps} steps a peer, in turns; the median of a round's steps, then of the "
            f"rounds; every peer in processes of its own, {between}"
        )

    @property
    def reference(self) -> PeerResult | None:
        """The peer whose losses the others are compared with: Shoal's, else the first one's."""
        named = {result.name: result for result in self.measured}
        return named.get(SHOAL) or next(iter(self.measured), None)

    def loss_difference(self, result: PeerResult) -> float | None:
        """The largest relative difference of the warm-up losses from the reference's."""
        if self.reference is None or not result.losses or not self.reference.losses:
            return None
        pairs = zip(result.losses, self.reference.losses, strict=False)
        return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)

    def agrees(self, result: PeerResult) -> bool:
        difference = self.loss_difference(result)
        return difference is not None and difference <= TOLERANCE[self.job.config.recipe.precision]

    def tokens_per_s(self, result: PeerResult) -> float:
        return self.job.config.recipe.tokens_per_step / result.step_s

    def flops_per_s(self, result: PeerResult) -> float:
        """Model FLOPs, as ``predict/flops.py`` counts them, over all devices."""
        return self.tokens_per_s(result) * flops_per_token(self.job.model, self.job.config.recipe.seq)

    def mfu(self, result: PeerResult) -> float | None:
        cluster, layout = self.job.cluster, self.job.layout
        peak = cluster.device.peak(self.job.config.recipe.precision)
        # Ranks on a CPU share it; each rank has its own GPU, unless GPUs are shared too.
        devices = cluster.devices if cluster.device.name == "cpu" else min(cluster.devices, layout.world)
        return self.flops_per_s(result) / (peak * devices) if peak else None

    def ratio(self, result: PeerResult) -> tuple[float, float, float] | None:
        """Shoal's rate over the peer's: the median over rounds, and its 95 % interval. Each round pairs the two."""
        ours = self.reference
        if ours is None or ours.name != SHOAL or result is ours:
            return None
        ratios = [theirs / mine for mine, theirs in zip(ours.medians, result.medians, strict=True)]
        return median(ratios), *bootstrap(ratios)

    def document(self) -> dict[str, Any]:
        job, recipe = self.job, self.job.config.recipe
        return {
            "ok": self.ok,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": git_commit(Path(__file__).parent, 12),
            "device": job.cluster.device.name,
            "devices": min(job.cluster.devices, job.layout.world),
            "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version(), "shoal": __version__, **torch_versions()},
            "model": job.model.name,
            "shape": job.model.model_dump(mode="json"),
            "parameters": parameter_count(job.model),
            "layout": str(job.layout),
            "world": job.layout.world,
            "micro": job.layout.micro_batch(recipe.batch),
            "recipe": recipe.model_dump(mode="json"),
            "tokens_per_step": recipe.tokens_per_step,
            "flops_per_token": flops_per_token(job.model, recipe.seq),
            "rounds": self.rounds,
            "steps": self.steps,
            "warm_up": self.warm_up,
            "together": self.together,
            "how": self.how,
            "tolerance": TOLERANCE[recipe.precision],
            "peers": [self._row(result) for result in self.results],
            "left_out": [vars(one) for one in self.left_out],
        }

    def _row(self, result: PeerResult) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": result.name,
            "what": result.what,
            "versions": result.versions,
            "failure": result.failure,
            "traceback": result.traceback,
            "setup_s": result.setup_s,
            "losses": result.losses,
            "step_s_by_round": result.rounds,
            "processor_s_by_round": result.processor,
        }
        if result.failure is not None:
            return row
        ratio = self.ratio(result)
        return {
            **row,
            "step_s": result.step_s,
            "step_s_low": min(result.medians),
            "step_s_high": max(result.medians),
            "tokens_per_s": self.tokens_per_s(result),
            "model_tflops": self.flops_per_s(result) / 1e12,
            "mfu": self.mfu(result),
            "peak_allocated": result.peak_allocated,
            "peak_reserved": result.peak_reserved,
            "peak_resident": result.peak_resident,
            "loss_difference": self.loss_difference(result),
            "agrees": self.agrees(result),
            "shoal_over_this": None if ratio is None else ratio[0],
            "shoal_over_this_95": None if ratio is None else ratio[1:],
        }


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by resampling."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def torch_versions() -> dict[str, str | None]:
    import torch

    cudnn = torch.backends.cudnn.version()
    return {
        "torch": version("torch"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }
