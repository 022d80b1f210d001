"""``shoal plan``: options and output files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from shoal.facts.problem import Problem
    from shoal.plan.compare import Compared
    from shoal.plan.export import Exported
    from shoal.plan.export.rejudge import Rejudged
    from shoal.plan.report import PlanReport


def plan(
    model: str,
    /,
    *,
    on: Annotated[list[str], Parameter(negative=())],
    seq: int | None = None,
    batch: int | None = None,
    layout: str | None = None,
    tokens: str | None = None,
    price: Annotated[list[float] | None, Parameter(negative=())] = None,
    deadline: str | None = None,
    budget: str | None = None,
    top: int = 10,
    explain: Annotated[bool, Parameter(negative=())] = False,
    curve: Annotated[bool, Parameter(negative=())] = False,
    html: Path | None = None,
    save: Path | None = None,
    export: str | None = None,
    to: Path = Path(),
    force: Annotated[bool, Parameter(negative=())] = False,
    precision: str | None = None,
    optimizer: str = "adamw",
    states: str = "fp32",
    reduce: str = "fp32",
    lora: int | None = None,
    dora: Annotated[bool, Parameter(negative=())] = False,
    nf4: Annotated[bool, Parameter(negative=())] = False,
    stack: str = "shoal",
    links: Path | None = None,
    headroom: str | None = None,
    calibration: bool = True,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Price every layout of a model on a cluster and rank them: what fits, what is fastest, and why not the others.

    Example: shoal plan llama3-8b --on 64xH100 --seq 8192 --batch 512 --tokens 1T

    Example: shoal plan llama3-70b --on 8xH100 --seq 4096 --batch 64 --layout fsdp=8,recompute=full

    Example: shoal plan llama3-70b --on H100 --tokens 15T --deadline 90d

    Runs nothing and needs no GPU.

    Parameters
    ----------
    model
        A preset such as llama3-8b, a Hugging Face model directory, or the path of a config.json.
    on
        The cluster: 64xH100, 2x8xA100-80GB (nodes x devices), local, or a TOML file. A device without a count, as
        in H100, asks how many are needed. Repeat --on to compare clusters in one table.
    seq
        Tokens per sequence; by default the model's maximum, up to 8192.
    batch
        Sequences per step, over all ranks (the global batch); by default what is usual for that many --tokens.
    layout
        Judge only this layout, even if it does not fit.
    tokens
        Length of the run, as in 15T; adds days and GPU-hours. optimal: the compute-optimal number for the model.
    price
        Price of a GPU-hour; with --tokens, adds the cost. One for all, or one for each --on.
    deadline
        Time limit for the run, as in 30d: says whether it is met, how many GPUs would meet it, or, without
        --tokens, how many tokens it allows.
    budget
        Budget for the run at --price, as in 2M: says whether it is kept, how many GPUs are fastest within it, or,
        without --tokens, how many tokens it buys.
    top
        How many layouts to show.
    explain
        Also show where each layout's step time goes and why the runners-up lose.
    curve
        Also plan for fewer and more GPUs, and for other sequence lengths.
    html
        Write the whole plan as one HTML page with controls for GPUs, batch, sequence and recomputation. Takes a
        while, since it plans for half and twice of each too: docs/report.md.
    save
        Write a config that shoal train runs.
    export
        Write the same layout for deepspeed, accelerate, megatron, megatron-bridge, torchtitan, nemo or sagemaker;
        or the nearest one that it runs, judged as it will run there.
    to
        Directory for the exported files, created if it does not exist (its parent must).
    force
        Overwrite existing files.
    precision
        Compute precision: bf16, fp16, fp32, fp64 or fp8. By default bf16; fp16 on devices without it.
    optimizer
        adamw or sgd.
    states
        Precision of weights and optimizer states at rest: fp32, bf16 or int8.
    reduce
        Precision of the gradient reduction: fp32 or bf16.
    lora
        Train LoRA adapters of this rank instead of the weights.
    dora
        With --lora: DoRA, which also trains the magnitude of every weight row.
    nf4
        With --lora: keep the blocks' frozen weights in 4 bits (QLoRA).
    stack
        Search and price under another stack's constraints and constants: shoal, megatron, torchtitan or deepspeed.
    links
        Price collectives by this file: the output of nccl-tests, or what shoal bench comm stored.
    headroom
        Device memory that every plan leaves free, as a fraction (0.1) or a size (8GiB); 0 asks for none. By
        default, the chosen layout runs out of memory less than once in 1,000 times.
    calibration
        Use the rates that shoal profile --calibrate measured for this kind of device, if there are any.
    json
        Print one JSON document on standard output.
    """
    import gc
    import os

    gc.disable()  # a search creates a million small objects and no cycles: collecting takes a tenth of its time

    from shoal.cli.plan_table import show, show_compared
    from shoal.cli.show import measured_rates, print_json, unwritable, use_calibration, warn_of_length
    from shoal.facts.problem import BadInput
    from shoal.plan.compare import Compared
    from shoal.plan.report import plan_report
    from shoal.plan.request import plan_request

    use_calibration(calibration)
    if top < 1:
        raise BadInput(f"--top {top}: must be 1 or more", "--top 10")
    _check_several(len(on), price, save, export)
    requests = [
        plan_request(
            model,
            one,
            seq=seq,
            batch=batch,
            layout=layout,
            lora=lora,
            dora=dora,
            nf4=nf4,
            tokens=tokens,
            price=None if price is None else price[place % len(price)],
            deadline=deadline,
            budget=budget,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            precision=precision,
            optimizer=optimizer,
            states=states,
            reduce=reduce,
            stack=stack,
            headroom=headroom,
        )
        for place, one in enumerate(on)
    ]
    asked = requests[0]
    if links is not None:
        from shoal.plan.link_files import use_links

        for request in requests:
            use_links(links, request.cluster)
    problems = list(unwritable(path for path in (html, save) if path is not None))
    if export is not None:
        _known_stack(export)
        problems += _unusable_folder(to)
    if problems:
        raise BadInput(problems)
    if save is not None:
        if stack != "shoal":
            raise BadInput("--save: shoal train runs Shoal's engine", f"--export {stack}, or without --stack")
        from shoal.plan.save import refuse

        refuse(asked)
    _check_writable([path for path in (html, save) if path is not None], force)
    warn_of_length(asked.model, asked.recipe.seq)
    found = plan_report(asked, top, curve)
    rows = [Compared(found), *(Compared(plan_report(other, top)) for other in requests[1:])]
    files, exported, there = _files(found, rows, html, save, export, to)
    if export is not None:
        _make(to)
    _write(files, force)
    if json:
        document = found.as_json()
        if len(rows) > 1:
            document["compared"] = [row.as_json() for row in rows]
        document["written"] = [str(path) for path in files]
        if exported is not None and there is not None:
            document["export"] = {
                "command": _start(exported, to),
                "cannot": exported.cannot,
                "checked": exported.checked,
                "runs_as": there.as_json(),
            }
        print_json(document)
        return 0
    if len(rows) > 1:
        show_compared(rows)
    else:
        show(found, explain)
    if rates := measured_rates(asked.cluster):
        print(rates)
    if exported is not None and there is not None:
        print(f"\n{export} (checked with {exported.checked}): {_start(exported, to)}")
        print(f"  {there.words}")
        if there.warning:
            print(f"  warning: {there.warning}")
        for thing in exported.cannot:
            print(f"  {export} cannot express: {thing}")
    for path in files:
        print(f"wrote {path}" + (f"; then: shoal train {shlex.quote(str(path))}" if path == save else ""))
    return 0


def _check_several(clusters: int, prices: list[float] | None, save: Path | None, export: str | None) -> None:
    from shoal.facts.problem import BadInput

    if prices is not None and len(prices) not in (1, clusters):
        raise BadInput(
            f"--price: {len(prices)} prices for {clusters} clusters", "one for all, or one for each --on"
        )
    if clusters > 1 and (save is not None or export is not None):
        raise BadInput("--save and --export: one plan is written, not several", "a single --on")


def _known_stack(name: str) -> None:
    from shoal.facts.problem import BadInput, did_you_mean
    from shoal.plan.export import STACKS

    if name not in STACKS:
        raise BadInput(f"--export {name}: unknown stack", did_you_mean(name, STACKS))


def _files(
    found: PlanReport,
    rows: list[Compared],
    html: Path | None,
    save: Path | None,
    export: str | None,
    to: Path,
) -> tuple[dict[Path, str], Exported | None, Rejudged | None]:
    """Everything to be written, created before any file is; an export is judged as its target runs it."""
    files: dict[Path, str] = {}
    exported = there = None
    if save is not None:
        from shoal.plan.save import saved

        files[save], _ = saved(found.asked, found.chosen, save.parent)
    if export is not None:
        from shoal.facts.problem import BadInput
        from shoal.plan.export.rejudge import rejudged

        if found.choice is None or not found.choice.fits:
            raise BadInput("--export: no layout fits, so there is nothing to export", found.decision.text)
        exported, there = rejudged(export, found.choice, free=found.asked.layout is None)
        files.update({to / name: text for name, text in exported.files.items()})
    if html is not None:
        from shoal.plan.landscape import landscape
        from shoal.report.plan.plan_page import plan_page

        with _progress() as told:
            cells = landscape(found, told)
        files[html] = plan_page(found, cells, rows if len(rows) > 1 else [])
    return files, exported, there


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress line on a terminal while a page's grid is computed; nothing on a pipe."""
    shown = sys.stderr.isatty()

    def told(done: int, total: int) -> None:
        if shown:
            print(f"\rplanning for the page: {done} of {total}", end="", file=sys.stderr, flush=True)

    try:
        yield told
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _start(exported: Exported, to: Path) -> str:
    """The export's launch command, with its files' actual location."""
    words = exported.command.split(" ")
    return " ".join(shlex.quote(str(to / word)) if word in exported.files else word for word in words)


def _check_writable(files: Iterable[Path], force: bool) -> None:
    from shoal.cli.show import unwritable
    from shoal.facts.problem import BadInput, Problem

    files = list(files)
    problems = [
        Problem(f"{path} exists", "another name, or --force to replace it")
        for path in files
        if path.exists() and not path.is_dir() and not force
    ]
    problems += unwritable(files)
    if problems:
        raise BadInput(problems)


def _unusable_folder(to: Path) -> Iterator[Problem]:
    from shoal.facts.problem import Problem

    if to.is_dir():
        return
    if to.exists() or to.is_symlink():
        yield Problem(f"--to {to}: it is not a directory", "a directory, or a name that is free")
    elif not to.parent.is_dir():
        yield Problem(f"--to {to}: there is no directory {to.parent}", "a directory that exists")


def _make(to: Path) -> None:
    from shoal.facts.problem import BadInput

    try:
        to.mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot create {to}: {error.strerror}", "another place") from None


def _write(files: dict[Path, str], force: bool) -> None:
    from shoal.facts.problem import BadInput

    _check_writable(files, force)
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}", "another place") from None
