"""``shoal evaluate``: the loss of a run's weights on data sets; their results on tasks of lm-eval."""

from __future__ import annotations

import math
import os
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from shoal.launch.screen import Console


def evaluate(
    weights: str,
    /,
    *,
    data: Annotated[list[str] | None, Parameter(negative=())] = None,
    tasks: Annotated[list[str] | None, Parameter(negative=())] = None,
    samples: Annotated[int, Parameter(validator=Number(gte=1, lte=10**12), show_default=False)] = 10**12,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    layout: str = "dp=1",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compute the loss of a run's weights: on its own validation text, or on data sets by name.

    Example: shoal evaluate runs/tiny --data wiki=data/wiki/*.jsonl --data code=data/code.txt

    Example: shoal evaluate runs/tiny --tasks hellaswag --tasks my_task.yaml

    With the run's own tokenizer, sequence length and precision; in one process, or in ranks of --layout.

    Parameters
    ----------
    weights
        A run's directory (its newest sound checkpoint), a checkpoint, a Hugging Face model directory or Hub name.
    data
        NAME=SOURCE, with SOURCE as in data.source; all of it is used. May be given several times. By default what the
        run held out of training.
    tasks
        A task of lm-eval, by name or as the path of its YAML file; where lm-eval is installed. May be given several
        times.
    samples
        At most this many samples of each, spread evenly; by default all.
    set
        Override one value of the run's config, as in recipe.seq=1024. May be given several times.
    layout
        The parallel layout, as in tp=2.
    json
        Print one JSON document.
    """
    from shoal.cli.show import print_columns, print_json
    from shoal.facts.problem import BadInput
    from shoal.launch import evaluate as launcher

    if tasks and data:
        raise BadInput("--tasks and --data are evaluated apart", "leave out one of them")
    if tasks:
        return _tasks(weights, tasks, samples if samples < 10**12 else None, set or [], layout, json)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    job, place, own = launcher.job_for(weights, layout, set or [], os.environ.get("CUDA_VISIBLE_DEVICES"))
    sets = launcher.prepare_sets(job, data or [], own, console)
    losses = launcher.losses_of(job, place, sets, samples)
    if json:
        rows = [
            {"name": one.name, "loss": one.loss, "perplexity": _perplexity(one.loss), "samples": one.samples}
            for one in losses
        ]
        print_json({"weights": place, "layout": str(job.layout), "seq": job.config.recipe.seq, "sets": rows})
        return 0
    head = ("data", "loss", "perplexity", "samples")
    table = [
        (one.name, _number(one.loss), _number(_perplexity(one.loss)), f"{one.samples:,}") for one in losses
    ]
    print_columns([head, *table])
    return 0


def _tasks(
    weights: str, names: list[str], limit: int | None, overrides: list[str], layout: str, json: bool
) -> int:
    """Run lm-eval, whose metrics keep their names."""
    from shoal.cli.show import print_columns, print_json
    from shoal.launch import evaluate as launcher
    from shoal.launch.tasks import check_tasks, score_tasks

    check_tasks(names, layout)
    job, place, _ = launcher.job_for(weights, layout, overrides, os.environ.get("CUDA_VISIBLE_DEVICES"))
    results = score_tasks(job, place, names, limit)
    if json:
        print_json({"weights": place, "layout": str(job.layout), "tasks": results})
        return 0
    rows = [
        (name, metric.partition(",")[0], f"{value:.4f}")
        for name, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float)
    ]
    print_columns([("task", "metric", "value"), *rows])
    return 0


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


def _number(value: float | None) -> str:
    return "nothing to predict" if value is None else f"{value:.4f}"
