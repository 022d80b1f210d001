"""``shoal chaos``: inject faults into a run and compare."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.prove.chaos.campaign import InjectedFault
    from shoal.prove.chaos.verdict import ChaosVerdict


def chaos(
    config: Path | None = None,
    /,
    *,
    faults: int = 40,
    seed: int = 0,
    layouts: str = "dp=1;dp=2;dp=2,fsdp=2",
    kinds: str = "",
    nodes: int = 1,
    strict: bool = True,
    run: Path = Path("runs/chaos"),
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Inject faults into a real run and prove that the loss curve did not change.

    Example: shoal chaos examples/chaos.toml --faults 300

    Trains once without faults, then again while killing, stopping and corrupting ranks, the launcher and checkpoints at
    seeded points. Compares losses, weights, optimizer states and the samples used. Exit code 1 if anything differs.
    faults.jsonl, curve.svg and both runs stay in the directory of --run.

    Parameters
    ----------
    config
        A TOML file; without one the embedded default is run.
    faults
        Number of faults.
    seed
        Seed that decides which faults strike, where and when.
    layouts
        Layouts separated by ";". After every fault of the launcher, the run resumes in the next one.
    kinds
        Only these kinds of faults, separated by ","; by default all.
    nodes
        Number of nodes, each with its own launcher on this machine; single nodes are lost and come back. Layouts
        need the same number of ranks on every node.
    strict
        Compare bit by bit (dp, fsdp, pp); otherwise within fp32 rounding.
    run
        Directory for both runs. An earlier campaign there is replaced.
    set
        Override one value, as in recipe.lr=0.001. May be given several times.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    from shoal.cli.main import fail
    from shoal.cli.show import print_json
    from shoal.facts.config.file import load
    from shoal.facts.problem import BadInput, Problem
    from shoal.launch.report import FAILED, FINISHED
    from shoal.prove.chaos import experiment as campaign
    from shoal.prove.chaos.campaign import Broken

    if faults < 1:
        raise BadInput(f"--faults {faults}: must be 1 or more", "--faults 40")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    chosen = [layout.strip() for layout in layouts.split(";") if layout.strip()]
    values = campaign.settings(faults, strict, set or [])
    if not chosen:
        raise BadInput("--layouts is empty", '--layouts "dp=2;fsdp=2"')
    loaded = load(config, values, chosen[0])
    with loaded.located():
        wanted = campaign.check(chosen, loaded.config, kinds, nodes)
    _make_room(run)

    def say(text: str) -> None:
        console.print(text, markup=False)

    try:
        verdict = campaign.prove(
            config, values, chosen, run, seed, faults, wanted, nodes, say, lambda one: say(_line(one))
        )
    except Broken as error:
        return fail([Problem(f"the run did not survive: {error}")], FAILED, json)
    _draw(run, verdict, console)
    if json:
        print_json(verdict.as_json())
    else:
        _table(verdict)
    return FINISHED if verdict.holds else FAILED


def _make_room(folder: Path) -> None:
    """Replace an earlier campaign; leave anything else alone."""
    from shoal.facts.problem import BadInput

    ours = {"reference", "run", "run.chaos", "faults.jsonl", "curve.svg"}
    if folder.exists() and any(entry.name not in ours for entry in folder.iterdir()):
        raise BadInput(
            f"{folder} holds something other than a chaos campaign", "another directory: --run DIR"
        )
    shutil.rmtree(folder, ignore_errors=True)


def _line(one: InjectedFault) -> str:
    whom = "" if one.rank is None else f" of rank {one.rank}"
    named = {True: "named right", False: "NOT NAMED RIGHT", None: ""}[one.named_right]
    second = " while recovering" if one.in_recovery else ""
    seconds = "" if one.recovered_s is None else f"recovered in {one.recovered_s:5.2f} s"
    what = f"{one.kind}{whom} at {one.point}{second}, {one.layout}"
    named = "skipped: it was the only sound copy" if one.spared else named
    return f"{one.number + 1:4}  step {one.step:5}  {what}: {seconds}  {named}"


def _draw(folder: Path, verdict: ChaosVerdict, console: Console) -> None:
    from shoal.prove.chaos import picture
    from shoal.train.files import read_rows
    from shoal.train.run_directory import RunDirectory

    rows = read_rows(RunDirectory(folder / "run").metrics)
    (folder / "curve.svg").write_text(picture.svg(rows, verdict.struck), encoding="utf-8")
    for line in picture.lines(rows, verdict.struck):
        console.print(line, markup=False)


def _table(verdict: ChaosVerdict) -> None:
    import statistics

    table = Table(title=f"{len(verdict.struck)} faults in {verdict.seconds / 60:.1f} minutes")
    for heading in ("kind", "faults", "named right", "recovered, median s", "worst s"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in dict.fromkeys(one.kind for one in verdict.struck):
        mine = [one for one in verdict.struck if one.kind == kind]
        judged = [one.named_right for one in mine if one.named_right is not None]
        seconds = [one.recovered_s for one in mine if one.recovered_s is not None]
        table.add_row(
            kind,
            str(len(mine)),
            f"{sum(judged)} of {len(judged)}" if judged else "",
            f"{statistics.median(seconds):.2f}",
            f"{max(seconds):.2f}",
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    proof = verdict.proof
    same = "identical to the bit" if verdict.strict else "the same within rounding"
    console.print(f"losses: {verdict.first_difference or f'{proof.steps} steps, {same}'}", markup=False)
    console.print(f"weights and optimizer states: {verdict.weights_differ or same}", markup=False)
    once = f"{proof.samples} used, each exactly once" if proof.holds else "; ".join(proof.problems[:3])
    console.print(f"samples: {once}", markup=False)
    gone = sum(one.gone for one in verdict.struck)
    console.print(
        f"committed steps lost: {verdict.steps_lost} (every copy of {gone} was destroyed on purpose); "
        f"steps recomputed: {proof.redone}, at most {verdict.most_redone} uncommitted per fault",
        markup=False,
    )
