"""A training in this process, without launcher or workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from shoal.facts.config.file import load
from shoal.launch.local import prepared
from shoal.models.decoder import Network
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import resolve
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory


def network_of(training: Training) -> Network:
    """The network of a rank without a pipeline: one segment, and it is all."""
    (segment,) = training.program.placed.segments
    return segment.network


@pytest.fixture
def training(settings: Callable[..., list[str]], tmp_path: Path) -> Callable[..., Training]:
    """``training("name", recipe__lr=0.1)``: built, or restored where the directory has a checkpoint; not yet run."""

    def make(name: str = "run", layout: str = "dp=1", **overrides: Any) -> Training:
        job = resolve(load(None, settings(**overrides), layout).config)
        run = RunDirectory(tmp_path / name)
        run.path.mkdir(exist_ok=True)
        run.write_start(job, {}, {})
        dataset = prepared(job.config.data, Console(stderr=True), job.config.evaluate)
        return Training(job, run, dataset, Mesh(job.layout, 0, torch.device("cpu")))

    return make
