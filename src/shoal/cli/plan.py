"""``shoal plan``: options and output files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from shoal.plan.export import Exported
    from shoal.plan.report import PlanReport


def plan(
    model: str,
    /,
    *,
    on: str,
    seq: int,
    batch: int,
    layout: str | None = None,
    tokens: str | None = None,
    price: float | None = None,
    top: int = 10,
    explain: Annotated[bool, Parameter(negative=())] = False,
    curve: Annotated[bool, Parameter(negative=())] = False,
    html: Path | None = None,
    save: Path | None = None,
    export: str | None = None,
    to: Path = Path(),
    force: Annotated[bool, Parameter(negative=())] = False,
    precision: str = "bf16",
    optimizer: str = "adamw",
    states: str = "fp32",
    reduce: str = "fp32",
    lora: int | None = None,
    headroom: str | None = None,
    calibration: bool = True,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Price every layout of a model on a cluster and rank them: what fits, what is fastest, and why not the others.

    Example: shoal plan llama3-8b --on 64xH100 --seq 8192 --batch 512 --tokens 1T

    Example: shoal plan llama3-70b --on 8xH100 --seq 4096 --batch 64 --layout fsdp=8,recompute=full

    Runs nothing and needs no GPU.

    Parameters
    ----------
    model
        A preset such as llama3-8b, a Hugging Face model directory, or the path of a config.json.
    on
        The cluster: 64xH100, 2x8xA100-80GB (nodes x devices), local, or a TOML file.
    seq
        Tokens per sequence.
    batch
        Sequences per step, over all ranks (the global batch).
    layout
        Judge only this layout, even if it does not fit.
    tokens
        Length of the run, as in 15T: adds days and GPU-hours.
    price
        Price of a GPU-hour; with --tokens, adds the cost.
    top
        How many layouts to show.
    explain
        Also show where each layout's step time goes and why the runners-up lose.
    curve
        Also plan for fewer and more GPUs, and for other sequence lengths.
    html
        Write the whole plan as one HTML file.
    save
        Write a config that shoal train runs.
    export
        Write the same layout for deepspeed, accelerate, megatron, torchtitan, nemo or sagemaker.
    to
        Directory for the exported files.
    force
        Overwrite existing files.
    precision
        Compute precision: bf16, fp16, fp32, fp64 or fp8.
    optimizer
        adamw or sgd.
    states
        Precision of weights and optimizer states at rest: fp32, bf16 or int8.
    reduce
        Precision of the gradient reduction: fp32 or bf16.
    lora
        Train LoRA adapters of this rank instead of the weights.
    headroom
        Device memory that every plan leaves free, as a fraction (0.1) or a size (8GiB). Unless given, only what is
        chosen leaves a tenth.
    calibration
        Use the rates that shoal profile --calibrate measured for this kind of device, if there are any.
    json
        Print one JSON document on standard output.
    """
    import gc
    import os

    gc.disable()  # a search makes a million small things and no circles: looking for these is a tenth of its time

    from shoal.cli.plan_table import show
    from shoal.cli.show import measured_rates, print_json, use_calibration, warn_of_length
    from shoal.facts.problem import BadInput
    from shoal.plan.report import plan_report
    from shoal.plan.request import plan_request

    use_calibration(calibration)
    if top < 1:
        raise BadInput(f"--top {top}: must be 1 or more", "--top 10")
    asked = plan_request(
        model,
        on,
        seq=seq,
        batch=batch,
        layout=layout,
        lora=lora,
        headroom=headroom,
        tokens=tokens,
        price=price,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        precision=precision,
        optimizer=optimizer,
        states=states,
        reduce=reduce,
    )
    if price is not None and tokens is None:
        raise BadInput("--price needs the length of the run in tokens", "--tokens 15T --price 2.5")
    if export is not None:
        _known_stack(export)
    if save is not None:
        from shoal.plan.save import refuse

        refuse(asked)
    warn_of_length(asked.model, seq)
    found = plan_report(asked, top, curve)
    files, exported = _files(found, html, save, export, to)
    _write(files, force)
    if json:
        document = found.as_json()
        document["written"] = [str(path) for path in files]
        if exported is not None:
            document["export"] = {"command": _start(exported, to), "cannot": exported.cannot}
        print_json(document)
        return 0
    show(found, explain)
    if rates := measured_rates(asked.cluster):
        print(rates)
    if exported is not None:
        print(f"\n{export}: {_start(exported, to)}")
        for thing in exported.cannot:
            print(f"  {export} cannot express: {thing}")
    for path in files:
        print(f"wrote {path}" + (f"; then: shoal train {shlex.quote(str(path))}" if path == save else ""))
    return 0


def _known_stack(name: str) -> None:
    from shoal.facts.problem import BadInput, did_you_mean
    from shoal.plan.export import STACKS

    if name not in STACKS:
        raise BadInput(f"--export {name}: unknown stack", did_you_mean(name, STACKS))


def _files(
    found: PlanReport, html: Path | None, save: Path | None, export: str | None, to: Path
) -> tuple[dict[Path, str], Exported | None]:
    """Everything that is to be written, made before anything is."""
    files: dict[Path, str] = {}
    exported = None
    if save is not None:
        from shoal.plan.save import saved

        files[save], _ = saved(found.asked, found.chosen, save.parent)
    if export is not None:
        from shoal.facts.problem import BadInput
        from shoal.plan.export import export as export_to

        if found.choice is None or not found.choice.fits:
            raise BadInput("--export: no layout fits, so there is nothing to export", found.decision.text)
        exported = export_to(export, found.choice.workload)
        files.update({to / name: text for name, text in exported.files.items()})
    if html is not None:
        from shoal.plan.html_page import page

        files[html] = page(found)
    return files, exported


def _start(exported: Exported, to: Path) -> str:
    """The command that starts it, with its files where they were written."""
    words = exported.command.split(" ")
    return " ".join(shlex.quote(str(to / word)) if word in exported.files else word for word in words)


def _write(files: dict[Path, str], force: bool) -> None:
    from shoal.cli.show import unwritable
    from shoal.facts.problem import BadInput, Problem

    problems = [
        Problem(f"{path} exists", "another name, or --force to replace it")
        for path in files
        if path.exists() and not path.is_dir() and not force
    ]
    problems += unwritable(files)
    if problems:
        raise BadInput(problems)
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}", "another place") from None
