"""Extend a run, or branch a new one from any checkpoint, with its weights, optimizer and position in the data.

More steps change the learning rate from where its decay begins. A run that has not reached the decay becomes the run it
would have been with more steps from the start, provided its warm-up keeps its number of steps. A run past that point
does not: there the longer run branches from the last checkpoint before the decay, and the old one stays as it is. Needs
no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe
from shoal.facts.stored_states import Keeps
from shoal.plan.resolve import Job
from shoal.train.checkpoint.listing import ListedCheckpoint, list_checkpoints, run_of
from shoal.train.checkpoint.manifest import identity_hash
from shoal.train.checkpoint.storage import CheckpointStorage
from shoal.train.files import StepFile, read_rows, replace_text
from shoal.train.run_directory import RunDirectory, identity

# What a checkpoint's states depend on: the samples that were used, and what the optimizer keeps.
KEPT = ("recipe.batch", "recipe.optimizer", "recipe.ema")
COPIED_AT_ONCE = 1 << 24
# In a run that began as a branch: where it branched off.
BRANCH = "branch.json"


@dataclass(frozen=True)
class Extension:
    """An extended run: the job with its warm-up kept, where it continues, and the message for the user."""

    job: Job
    run: RunDirectory
    branch: ListedCheckpoint | None  # None: the run itself continues
    note: str


def extend(job: Job, run: RunDirectory) -> Extension:
    """Plan the extension of a run, which may be finished. Reads only."""
    run.keep_in(job.config.checkpoint.to)
    if not run.begun:
        raise BadInput(f"--extend: {run.path} has no run yet", "leave out --extend")
    then = run.begun_with()[1]
    steps, before = job.config.recipe.steps, then.get("recipe.steps")
    if not isinstance(before, int) or steps < before:
        raise BadInput(
            f"--extend: {run.path} has {before} steps already, recipe.steps is {steps}",
            f"--set recipe.steps={before * 2 if isinstance(before, int) else steps}",
        )
    job = _with_warmup(job, then)
    if steps == before:
        return Extension(job, run, None, f"{run.path} has {steps} steps: it goes on as it is")
    old = _recipe_then(job.config.recipe, then)
    limit = min(decay_begins(old), decay_begins(job.config.recipe))
    if run.step() <= limit:
        run.extending = True
        return Extension(job, run, None, f"extending {run.path} from {before} to {steps} steps: the same run")
    found = [one for one in list_checkpoints(run.path) if not one.damage and 0 < one.step <= limit]
    if not found:
        raise BadInput(
            f"--extend: the learning rate of {run.path} decays from step {limit} on, and there is no checkpoint before",
            f"a new run from its weights: --set model.init_from={run.path} --run DIR; a run with "
            'recipe.schedule = "wsd" or "constant" and checkpoint.keep_every can be extended',
        )
    longer = RunDirectory(run.path.with_name(f"{run.path.name}-{steps}"), run.node)
    start = found[-1]
    note = (
        f"the learning rate of {run.path} decays from step {limit} on, so {steps} steps are another run: "
        f"{longer.path}, from step {start.step}"
    )
    return Extension(job, longer, start, note)


def decay_begins(recipe: Recipe) -> int:
    """The last step whose learning rate does not depend on the length of the run."""
    if recipe.schedule == "constant":
        return recipe.steps
    if recipe.schedule == "wsd":
        return recipe.steps - recipe.decay_steps
    return recipe.warmup_steps


def check_branch(job: Job, start: ListedCheckpoint) -> None:
    """Refuse a job that cannot continue with a checkpoint's states."""
    assert start.manifest is not None
    problems = []
    model = Model.model_validate(start.manifest.model)
    if model.model_copy(update={"name": job.model.name}) != job.network:
        origin = run_of(Path(start.name)) or start.name
        problems.append(
            Problem(f"{start.name} is of another model, {model.name}", f"model.path = {str(origin)!r}")
        )
    now = identity(job, "")
    for key in KEPT:
        then = start.manifest.identity.get(
            key, now.get(key)
        )  # the checkpoint may predate a field of the recipe
        if then != now.get(key):
            problems.append(
                Problem(f"{start.name} has {key} = {then!r}, this job {now.get(key)!r}", f"set {key} back")
            )
    kept = Keeps.from_identity(start.manifest.identity)
    if not problems and kept != Keeps.of(job.config.recipe):
        what = f"{start.name} has other optimizer states than this job: 8 bits, or other frozen groups"
        problems.append(Problem(what, "set recipe.states and recipe.groups back"))
    if start.step >= job.config.recipe.steps:
        problems.append(
            Problem(
                f"{start.name} is after step {start.step}, recipe.steps is {job.config.recipe.steps}",
                f"more steps: --set recipe.steps={2 * start.step}",
            )
        )
    if problems:
        raise BadInput(problems)


def check_same_branch(run: RunDirectory, asked: Path, start: ListedCheckpoint) -> None:
    """Refuse to continue an existing run that did not branch from that checkpoint (for a run: from any of its
    checkpoints).
    """
    try:
        begun_at = read_json(run.path / BRANCH)
    except (OSError, ValueError):
        begun_at = None
    if not isinstance(begun_at, dict):
        begun_at = {}
    named = {"run": _absolute(asked), "checkpoint": _absolute(start.name)}
    if not any(begun_at.get(key) == name for key, name in named.items()):
        raise BadInput(
            f"--branch: {run.path} holds another run, which did not begin at {start.name}",
            f"--run DIR, for the branch; without --branch {run.path} goes on",
        )


def _absolute(place: Path | str) -> str:
    return str(place) if "://" in str(place) else str(Path(place).resolve())


def branch(job: Job, run: RunDirectory, start: ListedCheckpoint, dataset: str) -> None:
    """Start a run with a checkpoint's state as its own: committed in its directory, with the metrics rows up to it.

    ``dataset``: the hash of the job's data. A run that has already begun is left alone.
    """
    run.check_place()
    run.keep_in(job.config.checkpoint.to)
    if run.begun:
        return
    check_branch(job, start)
    assert start.manifest is not None
    with run.held():
        attempt = f"branch-{os.getpid()}"
        named = {
            file: run.disk.write(start.step, attempt, file, _content(start.place, start.step, file, size))
            for file, size in start.manifest.file_sizes().items()
        }
        mine = identity(job, dataset)
        pieces = tuple(one.model_copy(update={"file": named[one.file]}) for one in start.manifest.pieces)
        parts = tuple(
            one.model_copy(update={"file": named[one.file], "of": named[one.of]})
            for one in start.manifest.parts
        )
        changes = {"identity": mine, "recipe": identity_hash(mine), "pieces": pieces, "parts": parts}
        source = run_of(Path(start.name))
        if source is not None:
            rows = StepFile(run.metrics, 0)
            for row in read_rows(source / run.metrics.name):
                if row["step"] <= start.step:
                    rows.append(row)
            rows.sync()
        begun_at = {"checkpoint": _absolute(start.name), "run": _absolute(source) if source else None}
        replace_text(run.path / BRANCH, json.dumps(begun_at) + "\n")
        # Last: from here on there is something to resume.
        run.disk.commit(start.step, attempt, start.manifest.model_copy(update=changes).to_text())


def _content(place: CheckpointStorage, step: int, file: str, size: int) -> Iterator[memoryview]:
    for position in range(0, size, COPIED_AT_ONCE):
        part = memoryview(bytearray(min(COPIED_AT_ONCE, size - position)))
        place.read(step, file, position, part)
        yield part


def _with_warmup(job: Job, then: dict[str, Any]) -> Job:
    """Give the job the warm-up steps that the run began with, however they were written."""
    recipe = job.config.recipe.model_copy(update={"warmup": then["recipe.warmup"]})
    return replace(job, config=job.config.model_copy(update={"recipe": recipe}))


def _recipe_then(recipe: Recipe, then: dict[str, Any]) -> Recipe:
    """The recipe with the run's original length and schedule."""
    names = ("steps", "warmup", "decay", "schedule")
    return recipe.model_copy(
        update={name: then.get(f"recipe.{name}", getattr(recipe, name)) for name in names}
    )
