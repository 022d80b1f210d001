"""A run's directory: what it holds, who holds it, and whether a job may continue what is there. Needs no torch."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.facts import configfile
from shoal.facts.problem import BadInput, Problem
from shoal.plan.resolve import Job
from shoal.train.checkpoint.directory import committed, latest
from shoal.train.checkpoint.manifest import Damaged, read_manifest
from shoal.train.files import replace_text

# Where the data came from. What it is, its hash says; so files may move between a stop and a resume.
DATA_ORIGIN = ("source", "mix", "tokenizer", "end_token", "field", "heldout")
DATA_HASH = "data (hash of its tokens)"


def identity(job: Job, dataset: str) -> dict[str, Any]:
    """The recipe, the data and the origin of the weights: what a resume must have in common with its beginning."""
    config = job.config
    recipe = config.recipe.model_dump(mode="json")
    return {
        **{f"recipe.{name}": value for name, value in recipe.items()},
        **{f"data.{name}": getattr(config.data, name) for name in DATA_ORIGIN},
        "data.packing": config.data.packing,
        "data.within_documents": config.data.within_documents,
        DATA_HASH: dataset,
        "run.strict": config.run.strict,
        "model.init_from": config.model.init_from,
    }


class RunDirectory:
    """``runs/NAME``: config, plan, metrics, checkpoints, logs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.plan = path / "plan.json"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.faults = path / "faults.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the directory, for its owner's eyes only, and hold it: two live runs cannot share one.

        The lock goes with the process that holds it, however that ends, so no stale one is ever left.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(
                f"cannot use {self.path} as a run directory: {error.strerror}", "--run DIR"
            ) from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(
                    f"{self.path} is in use by a live run",
                    "wait for it, stop it, or choose another with --run DIR",
                ) from None
            yield
        finally:
            os.close(handle)

    @property
    def begun(self) -> bool:
        return self.config.exists() or bool(committed(self.checkpoints))

    def check_free(self) -> None:
        """Refuse a directory that a live run holds, without creating or changing anything."""
        lock = self.path / ".lock"
        if lock.exists():
            with self.held():
                pass
        elif self.path.exists() and (not self.path.is_dir() or (any(self.path.iterdir()) and not self.begun)):
            raise BadInput(f"{self.path} exists and is not a run", "choose another place with --run DIR")

    def step(self) -> int:
        """The last committed step; 0 before the first commit."""
        every = committed(self.checkpoints)
        return every[-1][0] if every else 0

    def check_continues(self, job: Job, dataset: str) -> None:
        """Refuse a job whose model, data or recipe differs from what the last checkpoint was made with."""
        checkpoint = latest(self.checkpoints)
        if checkpoint is None:
            return
        try:
            manifest = read_manifest(checkpoint)
        except Damaged as error:
            raise BadInput(str(error), f"remove {checkpoint} to continue from the one before it") from None
        fix = "--fresh moves the old run aside; or set it back"
        problems = []
        shapes = _differences(_shape(manifest.model), _shape(job.model.model_dump(mode="json")))
        if shapes:
            problems.append(Problem(f"{self.path} holds another model: {'; '.join(shapes)}", fix))
        now = json.loads(json.dumps(identity(job, dataset)))
        then = dict(manifest.identity)
        if now[DATA_HASH] == then.get(DATA_HASH):
            moved = {f"data.{name}" for name in DATA_ORIGIN}
            now, then = (
                {key: value for key, value in side.items() if key not in moved} for side in (now, then)
            )
        problems += [
            Problem(f"{self.path} holds another run: {text}", fix) for text in _differences(then, now)
        ]
        if problems:
            raise BadInput(problems)

    def move_aside(self) -> Path:
        """Rename the directory to the first free NAME.old-N."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        return self.path.rename(target)

    def note_fault(self, **row: Any) -> None:
        """Add a row to faults.jsonl, which keeps all that ever went wrong, also what a resume undid."""
        with self.faults.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **row}) + "\n")

    def write_start(self, job: Job, manifest: dict[str, Any], plan: dict[str, Any]) -> None:
        """What is known before the first step."""
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        replace_text(self.config, configfile.write(job.config))
        replace_text(self.plan, json.dumps(plan, indent=2) + "\n")
        replace_text(self.manifest, json.dumps(manifest, indent=2) + "\n")


def _shape(model: dict[str, Any]) -> dict[str, Any]:
    """What a model is, without what it is called."""
    return {name: value for name, value in model.items() if name != "name"}


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {then.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
