"""Step time, throughput and memory of a step."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import Any

import torch

from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.predict.flops import flops_per_token
from shoal.train.step import StepResult


class Meter:
    """Times steps and makes their rows."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.job, self.mesh = job, mesh
        self.layout = str(job.layout)
        recipe = job.config.recipe
        self.flops = flops_per_token(job.model, recipe.seq) * recipe.tokens_per_step
        # Ranks on a CPU share the cluster's devices; elsewhere each has its own device, unless devices are shared.
        devices = min(job.cluster.devices, job.layout.world)
        if job.cluster.device.name == "cpu":
            devices = job.cluster.devices
        peak = job.cluster.device.peak(recipe.precision)
        self.peak = peak * devices if peak else None
        self.seconds = self.waited = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Call when the previous step, its evaluation and its commit are over."""
        self._started = time.perf_counter()

    def have_input(self) -> None:
        """Call when the step's batches are here, on this rank and the others."""
        self.waited = time.perf_counter() - self._started

    def stop(self) -> None:
        """Call when the step's numbers have been read, so its work is done. The next step may already run."""
        started, self._started = self._started, time.perf_counter()
        self.seconds = self._started - started

    def row(self, step: int, result: StepResult, targets: int, waited: float) -> dict[str, Any]:
        """A row of metrics.jsonl. ``tokens`` and ``samples`` count from the start of the run, padding included.

        ``waited``: seconds that the step waited for input.
        """
        recipe = self.job.config.recipe
        batch, samples = recipe.clock.at(step), recipe.clock.before(step + 1)
        rate = self.flops * batch / recipe.batch / self.seconds
        return {
            "step": step,
            "loss": finite(result.loss),
            "loss_hex": float(result.loss).hex(),
            "grad_norm": finite(result.grad_norm),
            "lr": result.lr,
            "tokens": samples * recipe.seq,
            "samples": samples,
            "targets": targets,  # of this step: the tokens (or pairs) that its loss is a mean over
            "step_s": self.seconds,
            "input_wait_s": min(waited, self.seconds),  # part of step_s
            "tokens_per_s": batch * recipe.seq / self.seconds,
            "model_flops_per_s": rate,
            "mfu": rate / self.peak if self.peak else None,
            "memory_peak": peak_memory(self.mesh.device),
            "world": self.mesh.world,
            "layout": self.layout,
            **{name: finite(value) for name, value in result.measures.items()},
            **self._experts(result),
        }

    def _experts(self, result: StepResult) -> dict[str, Any]:
        """For MoE models: tokens sent to each expert, summed over layers, and the imbalance of the worst layer."""
        if result.experts is None:
            return {}
        recipe = self.job.config.recipe
        row = {"expert_load": result.experts.per_expert, "expert_imbalance": result.experts.imbalance}
        if recipe.router_aux:
            row["router_balance"] = finite(result.experts.balance / recipe.batch)
        if recipe.router_z:
            row["router_z"] = finite(result.experts.z / recipe.tokens_per_step)
        return row


def peak_memory(device: torch.device) -> int:
    """Bytes of this rank: the allocator's peak on a GPU, the process's peak resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
