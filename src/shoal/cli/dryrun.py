"""``shoal dryrun``: one rank of any world without hardware."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.show import print_columns, print_json, warn_of_length
from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.predict.workload import Workload
    from shoal.prove.dryrun import DryRun
    from shoal.prove.dryrun_findings import Finding

# Modules to show, those that hold the most at the peak.
MODULES_SHOWN = 8
# Options that go with a model, and the config keys that say the same.
OF_A_MODEL = {
    "--on": "cluster.on",
    "--seq": "recipe.seq",
    "--batch": "recipe.batch",
    "--precision": "recipe.precision",
}


def dryrun(
    what: str,
    /,
    *,
    on: str | None = None,
    seq: int | None = None,
    batch: int | None = None,
    layout: str | None = None,
    rank: int | None = None,
    stages: Annotated[bool, Parameter(negative=())] = False,
    precision: str | None = None,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run the real parallel code of one rank, in a world of any size, without hardware: memory and every collective.

    Example: shoal dryrun llama3-405b --on 16384xH100 --seq 8192 --batch 2048 --layout fsdp=128,tp=8,pp=16,micro=1

    Example: shoal dryrun examples/tiny.toml --layout fsdp=2,pp=2

    One training step (forward, backward, the pipeline's schedule, clipping, update), after a warm-up step, on tensors
    without data, with the attention kernel that the device would use. Peak memory and traffic are compared with the
    prediction, line by line. Exit code 1 on any difference in traffic, or more than 1 % in memory.

    Parameters
    ----------
    what
        A config, or a model: a preset such as llama3-8b, a Hugging Face directory, the path of a config.json.
    on
        With a model, the cluster: 64xH100, 2x8xA100-80GB (nodes x devices), local, or a TOML file.
    seq
        With a model: tokens per sequence.
    batch
        With a model: sequences per step, over all ranks.
    layout
        The layout; by default the config's, or the one that shoal plan chooses.
    rank
        The rank; by default the first rank of the stage that needs the most memory.
    stages
        Run one rank of every pipeline stage and match their sends with their receives.
    precision
        With a model: compute precision, bf16 by default.
    set
        With a config, override one value, as in recipe.batch=64. May be given several times.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    import time

    from shoal.cli.main import fail
    from shoal.facts.cluster.this_machine import usable_threads
    from shoal.facts.problem import BadInput, Problem
    from shoal.launch.report import FAILED, FINISHED

    began = time.perf_counter()
    if what.endswith(".toml"):
        others = {"--on": on, "--seq": seq, "--batch": batch, "--precision": precision}
        workload = _of_config(Path(what), layout, set or [], others)
    else:
        workload = _of_model(what, on, seq, batch, layout, precision, set)
    world = workload.layout.world
    if rank is not None and not 0 <= rank < world:
        raise BadInput(
            f"--rank {rank}: the layout {workload.layout} has {world} ranks", f"--rank {world - 1}"
        )
    if rank is not None and stages:
        raise BadInput("--rank and --stages are mutually exclusive", "use one of them")
    warn_of_length(workload.model, workload.recipe.seq)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    where = f"{workload.model.name} on {workload.cluster.name}, {workload.layout}"
    console.print(
        f"{where}: {'one rank of every stage' if stages else 'one rank'} of {world:,}", markup=False
    )
    if workload.compiled:
        console.print("blocks run eager here; training compiles them on this device", markup=False)

    from shoal.prove.dryrun import dryrun as run_dry
    from shoal.prove.dryrun import dryrun_stages, fullest_rank
    from shoal.prove.dryrun_findings import between_stages
    from shoal.prove.pinned_kernels import WrongKernel

    try:
        if stages:
            processes = min(workload.layout.pp, usable_threads())
            every = dryrun_stages(workload, processes, lambda seen: console.print(_line(seen), markup=False))
        else:
            every = [run_dry(workload, fullest_rank(workload) if rank is None else rank)]
    except WrongKernel as error:
        return fail([Problem(str(error))], FAILED, json)
    between = list(between_stages([seen.calls for seen in every])) if stages else []
    findings = [*(finding for seen in every for finding in seen.findings), *between]
    if json:
        print_json(_document(every, between, stages, time.perf_counter() - began))
    else:
        _show(max(every, key=lambda seen: seen.memory.peak_allocated))
        for finding in findings:
            print(f"DIFFERS  {finding.kind}: {finding.text}")
        print("differs from the prediction" if findings else "as predicted")
    return FAILED if findings else FINISHED


def _of_config(path: Path, layout: str | None, changes: list[str], others: dict[str, Any]) -> Workload:
    from shoal.facts.config.file import load
    from shoal.facts.problem import BadInput
    from shoal.plan.resolve import resolve

    given = {name: value for name, value in others.items() if value is not None}
    if given:
        instead = " ".join(
            f"--set {OF_A_MODEL[name]}={shlex.quote(str(value))}" for name, value in given.items()
        )
        raise BadInput(f"{', '.join(given)} with a config", f"change the config, or {instead}")
    loaded = load(path, changes, layout)
    config = loaded.config
    with loaded.located():
        if config.run.strict:
            raise BadInput(
                "run.strict: its order-independent sums cause extra traffic that is not predicted",
                "--set run.strict=false",
            )
        job = resolve(config, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return job.workload()


def _of_model(
    model: str,
    on: str | None,
    seq: int | None,
    batch: int | None,
    layout: str | None,
    precision: str | None,
    changes: list[str] | None,
) -> Workload:
    from shoal.facts import support
    from shoal.facts.config import Config
    from shoal.facts.problem import BadInput
    from shoal.plan.request import plan_request
    from shoal.plan.resolve import choose

    if changes:
        raise BadInput(
            "--set without a config", "--seq, --batch, --precision and --layout say what is wanted"
        )
    if on is None or seq is None or batch is None:
        example = (
            f"shoal dryrun {shlex.quote(model)} --on 8xH100 --seq 4096 --batch 64 --layout fsdp=8,micro=1"
        )
        raise BadInput("a model needs --on, --seq and --batch; a config is a .toml file", example)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    kind = precision or "bf16"
    asked = plan_request(model, on, seq=seq, batch=batch, layout=layout, visible=visible, precision=kind)
    if not asked.counted:
        raise BadInput(f"--on {on}: the number of devices is missing", f"--on 8x{asked.cluster.device.name}")
    config = Config(recipe=asked.recipe)
    chosen = asked.layout or choose(config, asked.cluster, asked.model)
    support.check(config, asked.model, chosen)
    return asked.workload(chosen)


def _line(seen: DryRun) -> str:
    off = seen.memory.peak_allocated / seen.predicted.peak_allocated - 1
    mark = "DIFFERS" if seen.findings else "ok     "
    return (
        f"{mark}  stage {seen.stage:3}  rank {seen.rank:6}  {seen.memory.peak_allocated / 2**30:8.2f} GiB "
        f"({100 * off:+.2f} %)  {len(seen.calls):7,} collectives  {seen.seconds:5.1f} s"
    )


def _show(seen: DryRun) -> None:
    from shoal.facts.ledger import CATEGORIES
    from shoal.train.metrics.observed import by_module

    print(f"rank {seen.rank}, stage {seen.stage}: {seen.seconds:.1f} s\n")
    rows: list[tuple[str, ...]] = [("bytes at the peak", "predicted", "dry run", "")]
    for name in (*CATEGORIES, "peak_allocated"):
        said, found = getattr(seen.predicted, name), getattr(seen.memory, name)
        rows.append((name, f"{said:,}", f"{found:,}", f"{100 * (found / said - 1):+.2f} %" if said else ""))
    print_columns(rows)
    print(f"\nthe peak: {seen.memory.instant}; predicted: {seen.predicted.instant}\n")
    held = list(by_module(seen.places).items())[:MODULES_SHOWN]
    print_columns([("most of it", ""), *((name or "(no module)", f"{size:,}") for name, size in held)])
    print()
    _show_traffic(seen)
    print()


def _show_traffic(seen: DryRun) -> None:
    said = {(row.op, row.group): row for row in seen.predicted_traffic}
    found = {(row.op, row.group): row for row in seen.traffic}
    rows: list[tuple[str, ...]] = [("collective", "group", "predicted", "", "dry run", "", "")]
    for op, group in sorted(said.keys() | found.keys()):
        one, other = said.get((op, group)), found.get((op, group))
        cells = [(f"{row.count:,}", f"{row.bytes:,}") if row else ("0", "0") for row in (one, other)]
        rows.append((op, group, *cells[0], *cells[1], "" if one == other else "differs"))
    if len(rows) == 1:
        print("no collective")
    else:
        print_columns(rows)


def _document(every: list[DryRun], between: list[Finding], stages: bool, seconds: float) -> dict[str, Any]:
    """CONTRACT's fields are those of the rank, or of the fullest stage's rank; all stages are listed beside them."""
    fullest = max(every, key=lambda seen: seen.memory.peak_allocated)
    document = _of_rank(fullest)
    if stages:
        document["stages"] = [_of_rank(seen) for seen in every]
        document["matches"] = all(seen.matches for seen in every)
        document["between_stages"] = [finding._asdict() for finding in between]
    document["seconds"] = seconds
    return document


def _of_rank(seen: DryRun) -> dict[str, Any]:
    from dataclasses import asdict

    from shoal.train.metrics.observed import by_module

    findings = seen.findings
    return {
        "layout": str(seen.workload.layout),
        "world": seen.workload.layout.world,
        "rank": seen.rank,
        "stage": seen.stage,
        "memory": seen.memory.as_json(),
        "predicted": seen.predicted.as_json(),
        "traffic": [asdict(row) for row in seen.traffic],
        "predicted_traffic": [asdict(row) for row in seen.predicted_traffic],
        "matches": seen.matches,
        "memory_matches": not any(finding.kind == "memory" for finding in findings),
        "findings": [finding._asdict() for finding in findings],
        "modules": by_module(seen.places),
        "seconds": seen.seconds,
    }
