"""``shoal profile``: time and memory of one step next to the prediction."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.show import print_columns, print_json, use_calibration, warn_of_length
from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.prove.profile import Profile


# Plan.step's names, and what a user reads.
PARTS = {
    "compute": "compute",
    "recompute": "recompute",
    "exposed_comm": "exposed communication",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "offload": "offload",
}


def profile(
    config: Path | None = None,
    /,
    *,
    layout: str | None = None,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    steps: int = 3,
    out: Path | None = None,
    calibrate: Annotated[bool, Parameter(negative=())] = False,
    calibration: bool = True,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Profile one step: where time and memory went, next to the prediction, and what to change.

    Example: shoal profile examples/tiny.toml --layout fsdp=2

    Runs a few ordinary steps from the initial weights on your hardware. Writes profile.json and a trace of
    every rank (open it at ui.perfetto.dev) to the run directory, and touches nothing else there.

    Parameters
    ----------
    config
        A TOML file; without one the embedded default is profiled.
    layout
        The parallel layout, as in fsdp=2, or auto.
    set
        Override one value, as in recipe.batch=8. May be given several times.
    steps
        Warm-up steps before anything is measured.
    out
        Output directory; by default the run directory ([run] dir and name).
    calibrate
        First measure the rates of this machine's device and links, and save them for plan; without a config, only that.
    calibration
        Predict with the rates that --calibrate measured here, if there are any.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    from shoal.facts.config.file import load
    from shoal.launch.report import FAILED, FINISHED
    from shoal.plan.resolve import resolve
    from shoal.train.run_directory import RunDirectory

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    use_calibration(calibration)
    # Reject bad input before measuring a machine for minutes.
    given = load(config, set, layout)
    loaded = given.config
    with given.located():
        job = resolve(loaded, visible)
    if calibrate:
        learned = _calibrate(console, visible)
        if config is None:
            if json:
                print_json({"calibration": learned})
            else:
                print("\n".join(learned["lines"]))
            return FINISHED

    from shoal.cli.main import fail
    from shoal.facts.problem import Problem
    from shoal.prove.profile import ProfileFailed
    from shoal.prove.profile import profile as measure

    directory = RunDirectory(out or Path(loaded.run.dir).expanduser() / loaded.run.slug)
    console.print(
        f"{job.model.name} on {job.cluster.device.name}, layout {job.layout}, run {directory.path}",
        markup=False,
    )
    warn_of_length(job.model, loaded.recipe.seq)
    try:
        with given.located():
            measured = measure(job, directory, steps, console, visible)
    except ProfileFailed as failure:
        return fail([Problem(str(failure))], FAILED, json)
    if json:
        print_json(measured.document())
    else:
        _show(measured)
    return FINISHED


def _calibrate(console: Console, visible: str | None) -> dict[str, Any]:
    from shoal.prove.calibrate import calibrate

    measured = calibrate(console, visible)
    return {"path": str(measured.path), "lines": measured.lines()}


def _show(measured: Profile) -> None:
    print_columns(_times(measured))
    print()
    print_columns(_memory(measured))
    print()
    if measured.pipeline is not None:
        shares = measured.pipeline
        schedule = f"{shares.scheduled:.1%} ({shares.apart:+.1%}); with equally long stages {shares.even:.1%}"
        print(
            f"pipeline idle {shares.measured:.1%} of the time; the schedule alone, with these compute times, {schedule}"
        )
    print(f"times of rank {measured.busiest.rank}, which computes longest; rates: {measured.rates.words}")
    for sentence in measured.verdict:
        print(f"- {sentence}")
    print(f"traces for ui.perfetto.dev: {measured.run.profiles}")


def _times(measured: Profile) -> list[tuple[str, ...]]:
    """Every part of the step once; indented rows are components of the part above."""
    seconds, predicted = measured.step, measured.plan.step
    rows: list[tuple[str, ...]] = [("time", "measured", "of step", "predicted", "error")]

    def add(name: str, ours: float, theirs: float | None = None, error: float | None = None) -> None:
        share = f"{ours / seconds['seconds']:.1%}"
        rows.append((name, _time(ours), share, "" if theirs is None else _time(theirs), _percent(error)))

    errors = measured.errors["step"]
    for part, name in PARTS.items():
        ours, theirs = seconds[part], getattr(predicted, part)
        if ours or theirs:
            add(name, ours, theirs, errors.get(part))
        if part == "compute":
            for kind, spent in measured.kinds.items():
                add(f"  {kind}", spent)
        if part == "exposed_comm":
            for collective, spent in measured.communication["exposed"].items():
                add(f"  {collective}", spent)
            if measured.communication["total"]:
                add("  (all communication)", measured.communication["total"])
    add("input wait", measured.input_wait)
    if measured.copies:
        add("copies to and from the host", measured.copies)
    add("host gaps", measured.host_gaps, predicted.other, measured.host_gaps_error)
    add("step", seconds["seconds"], predicted.seconds, errors["seconds"])
    return rows


def _memory(measured: Profile) -> list[tuple[str, ...]]:
    from shoal.facts.ledger import CATEGORIES

    held, predicted, errors = measured.memory, measured.plan.memory, measured.errors["memory"]
    rows: list[tuple[str, ...]] = [("memory", "measured", "predicted", "error")]
    for name in (*CATEGORIES, "peak_allocated", "reserved"):
        if held[name] is not None:
            error = _percent(errors.get(name))
            rows.append((name.replace("_", " "), _size(held[name]), _size(getattr(predicted, name)), error))
    return rows


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"
