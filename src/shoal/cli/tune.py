"""``shoal tune``: train, and find the fastest layout on the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.launch.tuning.trials import MOST_LAYOUTS


def tune(
    config: Path | None = None,
    /,
    *,
    layouts: str | None = None,
    most: int = MOST_LAYOUTS,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    layout: str | None = None,
    run: Path | None = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    calibration: bool = True,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train; try the plan's best layouts on the first steps and keep the fastest.

    Example: shoal tune examples/tiny.toml --layouts "dp=2;fsdp=2;pp=2" --set recipe.steps=200

    Every layout computes the same run, so no step is wasted: each is trained once, in one layout or another. A layout
    is tried only where what it is expected to save over the steps that are left pays for the moves to it and back.
    tuning.jsonl in the run directory keeps layouts, moves and the decision; the same command resumes: docs/tune.md.

    Parameters
    ----------
    config
        A TOML file; without one the embedded default is trained.
    layouts
        Layouts to try, separated by ";"; the run begins in the first unless --layout says otherwise. By default those
        within the error bar of the plan's best.
    most
        How many of the plan's layouts to try at most, that which the run begins in included.
    set
        Override one value, as in recipe.lr=0.001. May be given several times.
    layout
        The layout that the run begins in, as in dp=2, or auto.
    run
        The run directory itself; by default [run] dir and name.
    fresh
        Start over; an old run in the same directory is moved aside.
    calibration
        Predict with the rates that shoal profile --calibrate measured here, if there are any.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    from shoal.cli.announce import announced
    from shoal.cli.show import use_calibration
    from shoal.cli.summary import answer
    from shoal.facts.config.file import load
    from shoal.facts.layout import parse_layouts
    from shoal.facts.problem import BadInput
    from shoal.launch import local
    from shoal.launch.tuning.candidates import Tried

    use_calibration(calibration)
    named = parse_layouts(layouts or "")
    if layouts is not None and not named:
        raise BadInput("--layouts is empty", '--layouts "dp=4;fsdp=4"')
    first = layout or (str(named[0]) if named else None)
    given = load(config, [*(set or []), "tune.search=true"], first)
    job, directory, console = announced(given, run, fresh)
    with given.located():
        job = local.fetched(job, console)
        tried = Tried(tuple(named), most)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        report = local.train(job, directory, fresh, console, visible, tried=tried)
    return answer(report, json, report.tuning or {})
