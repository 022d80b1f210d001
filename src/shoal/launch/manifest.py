"""What a run directory records at its start: machine, versions, plan."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.facts import calibration
from shoal.facts.model.parameters import parameter_count
from shoal.plan.decide import duration
from shoal.plan.judge import as_json, judge
from shoal.plan.resolve import Job
from shoal.predict.flops import flops_per_token

PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "blake3")


def describe_run(job: Job, dataset: Path) -> dict[str, Any]:
    """manifest.json: versions, host, devices, code."""
    on_cpu = job.cluster.device.name == "cpu"
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "shoal": __version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "host": {"name": socket.gethostname(), "system": platform.platform(), "cores": os.cpu_count()},
        "cluster": job.cluster.model_dump(mode="json"),
        "git": git_commit(Path.cwd()),
        "model": job.network.model_dump(mode="json"),
        "parameters": parameter_count(job.model),
        "data": str(dataset),
        "memory_peak": "resident set of the first rank's process"
        if on_cpu
        else "allocated on the first rank's device",
        "flops": "model FLOPs: matrix products, causal attention once, input embedding not counted",
        "mfu": f"of {job.cluster.device.source}",
    }


def describe_plan(job: Job) -> dict[str, Any]:
    """plan.json: the layout with its prediction, as ``shoal plan --layout`` judges it."""
    config, recipe, asked = job.config, job.config.recipe, job.workload()
    rates = calibration.find(job.cluster)
    plan = judge(asked)
    plan.called = config.model.path or config.model.preset
    return {
        **as_json(plan),
        "rates": rates.words,
        "calibrated": rates.measured.date if rates.measured else None,
        "guess": not (rates.known or rates.measured),  # no device of this kind has been measured
        "micro_batch": asked.micro,
        "accumulation": asked.accumulation,
        "chosen_by": "auto" if config.layout == "auto" else "the user",
        "parameters": parameter_count(job.model),
        "model_flops_per_step": flops_per_token(job.model, recipe.seq) * recipe.tokens_per_step,
    }


def predicted_time(job: Job) -> str:
    """A line for the user before anything is computed: the predicted time of a step and of the run, and how reliable
    it is.
    """
    plan, steps = describe_plan(job), job.config.recipe.steps
    seconds = plan["step"]["seconds"]
    step = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
    known_length = job.config.recipe.epochs is None or "steps" in job.config.recipe.model_fields_set
    whole = f", {duration(seconds * steps)} for {steps:,} steps" if known_length else ""
    trust = (
        "a guess until shoal profile --calibrate has measured this machine"
        if plan["guess"]
        else f"± {plan['error_bar']:.0%}"
    )
    return f"predicted: {step} s/step{whole} ({trust})"


def git_commit(folder: Path, digits: int = 40) -> str | None:
    """The commit of a directory, marked if there are changes; None outside a repository."""
    try:
        command = ["git", "describe", "--always", "--dirty", f"--abbrev={digits}"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, cwd=folder)
        return found.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
