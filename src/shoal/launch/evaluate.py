"""Evaluate trained weights on datasets: in this process, or in ranks of a layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shoal.facts.config import HELDOUT, Config, EvaluateSection
from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch import local
from shoal.launch.generate import find_source, without_offload
from shoal.plan.resolve import Job, resolve
from shoal.train.checkpoint.listing import run_of

if TYPE_CHECKING:
    from shoal.parallel.signed_store import SignedStore
    from shoal.train.score_sets import EvaluationSet, SetLoss


def job_for(weights: str, layout: str, overrides: list[str], visible: str | None) -> tuple[Job, str, bool]:
    """The job to evaluate these weights in, where they are, and whether they have validation data of their own.

    Uses the run's own config, except for the layout and the overrides; for a model directory, defaults. If the run
    evaluates averaged weights (``evaluate.ema``), so does this.
    """
    from shoal.train.first_weights import weights_of

    source = find_source(weights)
    run = run_of(Path(source.weights)) if not (Path(source.weights) / "config.json").is_file() else None
    config = load(run / "config.toml" if run is not None else None, overrides, layout).config
    values = config.model_dump()
    values["model"] |= {"path": source.weights, "init_from": source.weights}
    values["compile"]["enabled"] = False
    values["server"]["servers"] = 0
    values["cluster"]["on"] = "local"
    if run is None:
        values["data"]["tokenizer"] = source.origin.tokenizer
    if config.recipe.loss_facts.reference:
        raise BadInput(
            f'recipe.loss = "{config.recipe.loss}" compares with the weights that the run began with, which a '
            "checkpoint does not hold",
            "metrics.jsonl has its validation losses; for the loss of the next token --set recipe.loss=next_token "
            "--set data.format=text --data NAME=SOURCE",
        )
    job = resolve(Config.model_validate(values), visible)
    local.check_devices(job, visible)
    weights_of(source.weights, job.model, job.config.evaluate.ema)  # refuses what does not fit
    return without_offload(job), source.weights, run is not None


def prepare_sets(job: Job, named: list[str], own: bool, console: Console) -> list[EvaluationSet]:
    """Tokenise the evaluation data: a run's own validation sets, or each named set, ``NAME=SOURCE``, as a whole."""
    from shoal.train.score_sets import EvaluationSet

    if not named and not own:
        raise BadInput("a model directory has no validation text of its own", "--data NAME=SOURCE")
    sets: list[EvaluationSet] = []
    if not named:
        path = local.tokenised(job, console).path
        held = (HELDOUT,) if job.config.data.heldout or not job.config.evaluate.sources else ()
        return [EvaluationSet(name, path, whole=False) for name in (*held, *job.config.evaluate.sources)]
    for one in named:
        name, _, source = one.partition("=")
        if not source:
            name, source = Path(one).stem, one
        if any(name == other.name for other in sets):
            raise BadInput(
                f"--data: {name} is the name of two data sets", "--data NAME=SOURCE, each with its own"
            )
        # Only this source: the run's own training and validation data play no part.
        data = job.config.data.model_copy(update={"source": source, "mix": [], "heldout": 0.0})
        changes = {"data": data, "evaluate": EvaluateSection()}
        asked = replace(job, config=job.config.model_copy(update=changes))
        sets.append(
            EvaluationSet(name, local.tokenised(asked, Console(quiet=True), "--data").path, whole=True)
        )
    return sets


def losses_of(job: Job, weights: str, sets: list[EvaluationSet], most: int) -> list[SetLoss]:
    from shoal.launch.init_rank import init_rank
    from shoal.train.score_sets import score_sets

    if job.layout.world == 1:
        return score_sets(job, init_rank(job, 0, 0, None), weights, sets, most)
    from shoal.launch.ranks import run_ranks

    local.warm_workers((*local.PRELOAD, "shoal.launch.evaluate"), job.config)
    found: list[SetLoss] = run_ranks(job.layout.world, _rank, (job, weights, sets, most))[0]
    return found


def _rank(
    rank: int, world: int, store: SignedStore, job: Job, weights: str, sets: list[EvaluationSet], most: int
) -> list[SetLoss]:
    from shoal.launch.init_rank import init_rank
    from shoal.train.score_sets import score_sets

    return score_sets(job, init_rank(job, rank, rank, store), weights, sets, most)
