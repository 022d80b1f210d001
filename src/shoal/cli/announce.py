"""What a run prints before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.facts.config.file import Loaded
    from shoal.plan.resolve import Job
    from shoal.train.run_directory import RunDirectory


def announced(
    given: Loaded,
    run: Path | None,
    fresh: bool,
    node: str | None = None,
    nodes: int = 1,
    ranks: int | None = None,
    quiet: bool = False,
) -> tuple[Job, RunDirectory, Console]:
    """The job of a config and its run, after printing what a user should know before anything is computed.

    ``ranks``: per node of ``nodes``, if another launcher has started them; ``quiet``: another rank prints.
    """
    from shoal.cli.show import measured_rates, warn_of_length
    from shoal.facts.config.implied import kept
    from shoal.launch.manifest import predicted_time
    from shoal.plan.resolve import resolve
    from shoal.train.run_directory import RunDirectory

    loaded, notes = given.config, _notes(given)
    path = run or Path(loaded.run.dir).expanduser() / loaded.run.slug
    directory = RunDirectory(path, node) if node is not None else RunDirectory(path)
    if not fresh and directory.begun:
        loaded, notes = kept(loaded, given.origins, path), []
    with given.located():
        job = resolve(loaded, os.environ.get("CUDA_VISIBLE_DEVICES"), nodes, ranks)
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    where = f"{job.cluster.device.name}, layout {job.layout}, run {directory.path}"
    console.print(f"{job.model.name} on {where}", markup=False)
    if not quiet:
        warn_of_length(job.model, loaded.recipe.seq)
    for note in notes:
        console.print(note, markup=False)
    console.print(predicted_time(job), markup=False)
    if rates := measured_rates(job.cluster):
        console.print(rates, markup=False)
    if job.cluster.device.name == "cpu" and loaded.recipe.precision in ("bf16", "fp16"):
        console.print(
            f"note: {loaded.recipe.precision} is very slow on CPUs without native support; use fp32"
        )
    return job, directory, console


def _notes(given: Loaded) -> list[str]:
    """Notes at a first start about values that the user did not set."""
    from shoal.facts.config.implied import ORIGINS, TOKENIZER, lacks_tokenizer

    config, notes = given.config, []
    if (origin := given.origin(TOKENIZER)) in ORIGINS:
        notes.append(f"tokenizer: {config.data.tokenizer}, as {origin} has it (data.tokenizer is not set)")
    weights = config.model.init_from
    if TOKENIZER not in given.origins and weights is not None and lacks_tokenizer(Path(weights).expanduser()):
        notes.append(
            f"note: {weights} has no tokenizer, so text becomes bytes; fix: data.tokenizer = the model's own"
        )
    if weights is not None and "recipe.lr" not in given.origins:
        notes.append(
            f"note: recipe.lr is not set; the default, {config.recipe.lr:g}, suits the tiny preset; "
            "fix: recipe.lr = 2e-5"
        )
    return notes
