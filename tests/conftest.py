"""What tests share: a server of warm processes, a small model, small data, and a way to train on them."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch._dynamo  # which torch imports on first use, here before what is there is frozen
from blake3 import blake3
from rich.console import Console

from shoal.facts import calibration
from shoal.facts.calibration import file as calibrationfile
from shoal.facts.config.file import load
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.launch import local
from shoal.launch.report import Report
from shoal.plan.resolve import resolve
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory
from tests import ranks

# No test asks the network for a model. Those of the Hub's names have a server of their own.
os.environ["HF_HUB_OFFLINE"] = "1"
# A busy machine is no failure: what an example may cost is not measured on a clock.
hypothesis.settings.register_profile(
    "shoal", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shoal")
# Several of these processes share the cores (`make test`), and threads on tiny tensors wait for each other's turn.
torch.set_num_threads(1)
# While tests are collected nothing becomes garbage: see below.
gc.disable()

WORDS = [
    "the",
    "shoal",
    "turns",
    "as",
    "one",
    "and",
    "no",
    "fish",
    "knows",
    "the",
    "way",
    "it",
    "goes",
    "but",
    "all",
    "arrive",
]


def pytest_collection_finish() -> None:
    """No garbage is looked for among what was imported and collected, by tests and by dry runs, which look often."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers are forked from one process that has imported torch; see tests/ranks.py.

    Their cache is a folder of this session, and not the user's.
    """
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(calibrationfile.VARIABLE, str(cache))
        # Torch has set it as we imported it; a user's own environment has not.
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        ranks.warm()
    return cache


@pytest.fixture(autouse=True)
def no_calibration(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Predictions rest on built-in rates, whatever was measured on the machine that runs the tests."""
    monkeypatch.setenv(calibrationfile.VARIABLE, str(tmp_path_factory.getbasetemp() / "no-calibration"))
    yield
    calibration.forget()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file whose documents differ in length, so that unpacked rows and ranks differ in targets."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as file:
        for number in range(240):
            text = " ".join(
                WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(3 + number % 23)
            )
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json of two narrow layers."""
    shape = PRESETS["tiny"].model_copy(
        update={
            "name": "small",
            "layers": 2,
            "hidden": 32,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "ffn": 64,
        }
    )
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps(write_config(shape)))
    return path


Train = Callable[..., "Run"]


class Run:
    """A finished call of ``train`` and what it left."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.directory = RunDirectory(report.run)
        self.rows = read_rows(self.directory.metrics)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def hexes(self) -> list[str]:
        return [row["loss_hex"] for row in self.rows]

    def checkpoint(self) -> Checkpoint:
        """The last one."""
        return Checkpoint(self.directory.disk, self.directory.disk.committed()[-1])

    def tensors(self) -> dict[str, str]:
        """The hash of every tensor of the last checkpoint, however it is cut: equal hashes are equal bits."""
        checkpoint = self.checkpoint()
        keys = sorted({(piece.state, piece.tensor) for piece in checkpoint.manifest.pieces})
        return {
            f"{state} {name}": blake3(
                checkpoint.tensor(state, name).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for state, name in keys
        }


@pytest.fixture
def settings(corpus: Path, small_model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """``--set`` values of a run that takes a second; keywords with __ for the dot override them."""

    def make(**overrides: Any) -> list[str]:
        values: dict[str, Any] = {
            "model.path": small_model,
            "data.source": corpus,
            "data.cache": tmp_path / "cache",
            "recipe.seq": 32,
            "recipe.batch": 8,
            "recipe.steps": 6,
            "recipe.warmup": 2,
            "recipe.lr": 0.01,
            "evaluate.every": 0,
            "evaluate.batches": 1,
            "evaluate.sample_tokens": 4,
            "checkpoint.every": 2,
            "cluster.on": "1xcpu",
            "fault.timeout": 20,
        }
        values.update({name.replace("__", "."): value for name, value in overrides.items()})
        if "data.mix" in values:
            del values["data.source"]
        return [
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in values.items()
        ]

    return make


@pytest.fixture
def train(settings: Callable[..., list[str]], tmp_path: Path) -> Train:
    """Train the small model for real, launcher, agent and workers included."""

    def run(name: str = "run", layout: str = "dp=1", fresh: bool = False, **overrides: Any) -> Run:
        job = resolve(load(None, settings(**overrides), layout).config)
        report = local.train(job, RunDirectory(tmp_path / name), fresh, Console(stderr=True))
        return Run(report)

    return run


@contextmanager
def after_steps(run: Path, count: int, action: Callable[[], None]) -> Iterator[None]:
    """Do something once a run has recorded so many steps, while the body runs."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            metrics = run / "metrics.jsonl"
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= count:
                action()
                return
            time.sleep(0.001)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield
    thread.join()


def workers() -> list[int]:
    """The worker processes, in the order they were started: children of the server that we started."""
    from multiprocessing.forkserver import _forkserver

    server = _forkserver._forkserver_pid
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return sorted(int(child) for child in children)[-2:]
