"""The end of a training command: the result, its files, and possible next commands."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shoal.cli.show import counted
from shoal.launch.report import FAILED, FINISHED, Report
from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.facts.config import Config

# Table width that never cuts a layout; a table uses only what it needs.
UNBROKEN = 1000


def answer(report: Report, json: bool, more: dict[str, Any]) -> int:
    """Report how a command ended, as JSON or for a user; returns its exit code. ``more``: additions to the document."""
    from shoal.cli.show import print_json

    page = written_report(report.run)
    if json:
        ended = {
            "run": str(report.run),
            "report": str(page) if page is not None else None,
            "step": report.step,
            "exit_code": report.code,
            "message": report.message,
        }
        print_json({**ended, **more})
    else:
        _summary(report, page, Console(highlight=False, soft_wrap=True, stderr=report.code == FAILED))
    return report.code


def written_report(run: Path) -> Path | None:
    """The path of the run's page; None if it could not be written, which is reported and changes nothing else."""
    from shoal.facts.problem import BadInput
    from shoal.report.run.write import write_report

    if not run.is_dir():
        return None
    try:
        return write_report([run])[0]
    except BadInput as error:
        print(f"no report: {error}", file=sys.stderr)
    except Exception as error:  # a successful run must not fail because of its picture
        print(f"no report: {type(error).__name__}: {error}; try shoal report {run}", file=sys.stderr)
    return None


def _summary(report: Report, page: Path | None, console: Console) -> None:
    from shoal.facts.losses import mean_over
    from shoal.launch.progress import validated
    from shoal.train.run_directory import RunDirectory

    console.print(report.message, markup=False)
    if report.tuning is not None:
        _print_tuning(report.tuning, console)
    if report.code != FINISHED:
        if page is not None:
            console.print(f"see {page}  what happened, on one page", markup=False)
        return
    if report.row:
        heldout = ""
        if report.heldout_loss is not None:
            # From the last step, if it was computed then: with several sets, each by name.
            of_last = report.row.get("heldout_loss") == report.heldout_loss
            heldout = f", validation {validated(report.row) if of_last else f'{report.heldout_loss:.4f}'}"
        loss = "not finite" if report.row["loss"] is None else f"{report.row['loss']:.4f}"
        console.print(f"final loss: training {loss}{heldout} (nats/{mean_over(report.row)})")
    if report.skipped:
        console.print(
            f"skipped {counted(report.skipped, 'update')}: gradients were not finite (faults.jsonl)"
        )
    console.print("see")
    for file, what in (
        ("report.html", "the run on one page: curves, faults, memory, time, samples"),
        ("metrics.jsonl", "every step: loss, rate, memory"),
        ("samples.jsonl", "text generated during training"),
        ("checkpoints", "weights under Hugging Face names, every byte hashed"),
        ("config.toml", "the complete, resolved config"),
    ):
        path = report.run / file
        if any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size:
            console.print(f"  {path}  {what}", markup=False)
    if RunDirectory(report.run).disk.committed():
        # Shell-quoted, wherever the run is.
        run, model = (shlex.quote(str(each)) for each in (report.run, f"{report.run}-hf"))
        console.print("next")
        config = _config(report.run)
        told = '"Once upon a time"  text' if not _is_chat(config) else '"…" --chat  an answer'
        console.print(f"  shoal generate {run} {told} from its weights", markup=False)
        adapted = config is not None and config.model.lora is not None
        merged = ", the adapters merged" if adapted else ""
        console.print(
            f"  shoal checkpoint export {run} --to hf {model}  for transformers, vLLM, TGI{merged}",
            markup=False,
        )
        if adapted and _has_unfused(report.run):
            adapter = shlex.quote(f"{report.run}-adapter")
            console.print(
                f"  shoal checkpoint export {run} --to peft {adapter}  for PEFT, the adapters alone",
                markup=False,
            )


def _config(run: Path) -> Config | None:
    from shoal.facts.config.file import load
    from shoal.facts.problem import BadInput

    try:
        return load(run / "config.toml").config
    except BadInput:
        return None


def _has_unfused(run: Path) -> bool:
    """Whether PEFT's files have a place for what this run trained beside its projections."""
    from shoal.facts.model.parameters import UNFUSED
    from shoal.facts.model.presets import at

    return at(str(run)).family in UNFUSED


def _is_chat(config: Config | None) -> bool:
    """Whether a run learned to answer: then text to continue shows little of it."""
    parts = () if config is None else config.data.parts
    return any(part.format != "text" and part.template != "none" for part in parts)


def _print_tuning(found: dict[str, Any], console: Console) -> None:
    """A table of what was tried, and what that cost and gained."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("", "predicted", "measured", "steps", "layout"):
        table.add_column(name, justify="left" if name in ("", "layout") else "right", no_wrap=True)
    for row in found["layouts"]:
        mark = "✓" if row["layout"] == found["chosen"] else "✗" if row["failed"] else ""
        seconds = f"{row['measured_step_s']:.3g} s" if row["measured_step_s"] else "not tried"
        bar = f"{row['predicted_step_s']:.3g} s ±{row['error_bar']:.0%}"
        table.add_row(mark, bar, "failed" if row["failed"] else seconds, str(row["steps"]), row["layout"])
    console.print(table, soft_wrap=False, width=UNBROKEN)
    cost, gain = found["cost"], found["gain"]
    chosen = f"chosen: {found['chosen']}, " if found["chosen"] else ""
    console.print(f"{chosen}{found['why']}", markup=False)
    moves = f"{len(found['moves'])} move{'s' * (len(found['moves']) != 1)} {cost['moves_s']:.1f} s"
    rest = f"slow first steps {cost['warm_up_s']:.1f} s, slower layouts {cost['slower_steps_s']:.1f} s"
    console.print(f"cost: {moves}, {rest}", markup=False)
    ahead = f", {gain['expected_s']:.1f} s more expected" if found["step"] < found["steps"] else ""
    console.print(
        f"gain over {found['first']}: {gain['saved_s']:.1f} s{ahead}; net {found['net_s']:+.1f} s",
        markup=False,
    )


def leave(code: int) -> NoReturn:
    """Exit immediately, without waiting for a backend whose peers are gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
