"""``shoal bench step``: a training step of Shoal next to other stacks' steps."""

from __future__ import annotations

import json as jsonlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.show import print_columns, print_json, unwritable, warn_of_length
from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.plan.resolve import Job
    from shoal.prove.bench.result import PeerResult, StepBench

# Everything that is not the step is off. A run never reaches its last step, where it would evaluate.
FIXED = {
    "recipe.steps": 10**6,
    "recipe.schedule": "constant",
    "recipe.warmup": 0,
    "recipe.lr": 3e-4,
    "evaluate.every": 0,
    "evaluate.batches": 0,
    "evaluate.samples": 0,
    "checkpoint.every": 0,
    "fault.timeout": 600.0,
}
# Default sequence length and precision.
ON_CPU = (128, "fp32")
ON_GPU = (4096, "bf16")


def step(
    model: str = "tiny",
    /,
    *,
    seq: int | None = None,
    batch: int = 8,
    precision: str | None = None,
    states: str = "fp32",
    clip: float = 1.0,
    layout: str = "dp=1",
    on: str = "local",
    peers: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)] = None,
    rounds: int = 3,
    steps: int = 8,
    warm_up: int = 3,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    picture: Path | None = None,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Measure a training step next to other stacks: same model, same rows, same optimizer, one run, in turns.

    Example: shoal bench step llama3.2-1b --seq 4096 --batch 8 --picture step.svg --out step.json

    Shoal runs as shoal train does, with its meter, guards and defaults. Peers are those found in this environment:
    plain PyTorch always, transformers with Accelerate, Lightning Fabric, torchtitan and DeepSpeed where installed. All
    begin with the same weights; a peer whose first losses differ from Shoal's is marked.

    Parameters
    ----------
    model
        A preset, a model directory or a config.json.
    seq
        Tokens per sequence: 4096 on a GPU, 128 on a CPU unless given.
    batch
        Sequences per step, over all ranks; one micro-batch unless the layout says micro=.
    precision
        Compute precision: bf16 on a GPU, fp32 on a CPU unless given.
    states
        Precision of weights and optimizer states at rest: fp32 or bf16.
    clip
        Maximum gradient norm; 0: no clipping.
    layout
        The parallel layout, as in dp=2; peers run their counterpart (DDP, fully_shard, …) where they have one.
    on
        The cluster: local, or 2xcpu for two processes on the CPU.
    peers
        Names separated by commas, such as shoal,pytorch; by default every peer that is found.
    rounds
        How many turns each peer has.
    steps
        Measured steps per turn.
    warm_up
        Steps before the first turn, or before every turn where a peer is started anew; their losses are compared.
    set
        Override a config value of all peers, as in recipe.lr=1e-4. May be given several times.
    picture
        Write a bar chart to this SVG file.
    out
        Write the JSON document to this file.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    from shoal.launch.report import FAILED, FINISHED
    from shoal.prove.bench.registry import choose

    counts = {"--rounds": rounds, "--steps": steps, "--warm-up": warm_up}
    _check(counts, picture, out)
    job = _job(model, layout, on, {"batch": batch, "states": states, "clip": clip}, seq, precision, set or [])
    kinds, left_out = choose(_names(peers), job)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    recipe = job.config.recipe
    shape = f"sequence {recipe.seq:,}, batch {recipe.batch}, {recipe.precision}, layout {job.layout}"
    console.print(f"{job.model.name} on {job.cluster.device.name}: {shape}", markup=False)
    warn_of_length(job.model, recipe.seq)
    for one in left_out:
        console.print(f"not measured: {one}", markup=False)

    from shoal.prove.bench.measure import measure

    found = measure(job, kinds, rounds, steps, warm_up, lambda line: console.print(line, markup=False))
    found = replace(found, left_out=tuple(left_out))
    _write(found, picture, out)
    if json:
        print_json(found.document())
    else:
        _show(found)
    return FINISHED if found.ok else FAILED


def _check(counts: dict[str, int], picture: Path | None, out: Path | None) -> None:
    from shoal.facts.problem import BadInput, Problem

    problems = [
        Problem(f"{flag} {count}: must be 1 or more", f"{flag} 3")
        for flag, count in counts.items()
        if count < 1
    ]
    problems += unwritable(path.expanduser() for path in (picture, out) if path is not None)
    if problems:
        raise BadInput(problems)


def _names(peers: list[str] | None) -> list[str] | None:
    if peers is None:
        return None
    from shoal.facts.problem import BadInput
    from shoal.prove.bench.registry import PEERS

    names = [name.strip() for words in peers for name in words.split(",") if name.strip()]
    if not names:
        raise BadInput("--peers is empty", f"--peers {','.join(PEERS)}")
    return names


def _job(
    model: str,
    layout: str,
    on: str,
    told: dict[str, Any],
    seq: int | None,
    precision: str | None,
    overrides: list[str],
) -> Job:
    from shoal.facts.cluster import notation
    from shoal.facts.config.file import load
    from shoal.facts.model import presets
    from shoal.launch import local
    from shoal.plan.resolve import resolve

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shape = presets.find(model)
    length, usual = ON_CPU if notation.find(on, visible).device.name == "cpu" else ON_GPU
    length = min(length, shape.max_positions) if seq is None else seq
    recipe = {**told, "seq": length, "precision": precision or usual}
    key = "preset" if model.lower() in presets.PRESETS else "path"
    values = {
        f"model.{key}": model,
        "cluster.on": on,
        **FIXED,
        **{f"recipe.{name}": value for name, value in recipe.items()},
    }
    given = load(None, [*(f"{name}={value}" for name, value in values.items()), *overrides], layout)
    with given.located():
        job = resolve(given.config, visible)
        local.check_devices(job, visible)
        local.check_memory(job)
    return job


def _write(found: StepBench, picture: Path | None, out: Path | None) -> None:
    from shoal.prove.bench.picture import svg

    if picture is not None:
        picture.expanduser().write_text(svg(found), "utf-8")
    if out is not None:
        out.expanduser().write_text(jsonlib.dumps(found.document(), indent=2) + "\n", "utf-8")


def _show(found: StepBench) -> None:
    rows: list[tuple[str, ...]] = [
        (
            "peer",
            "tokens/s",
            "ms a step",
            "of rounds",
            "TFLOP/s",
            "MFU",
            "peak GiB",
            "Shoal is",
            "95 %",
            "losses",
        )
    ]
    for result in found.results:
        if result.failure is not None:
            rows.append((result.name, *[""] * 8, "failed"))
            continue
        mfu, peak, ratio = found.mfu(result), result.peak_allocated, found.ratio(result)
        rows.append(
            (
                result.name,
                f"{found.tokens_per_s(result):,.0f}",
                f"{result.step_s * 1e3:,.1f}",
                f"{min(result.medians) * 1e3:,.1f}–{max(result.medians) * 1e3:,.1f}",
                f"{found.flops_per_s(result) / 1e12:,.4g}",
                "" if mfu is None else f"{mfu:.1%}",
                "" if peak is None else f"{peak / 2**30:.1f}",
                "" if ratio is None else f"{ratio[0]:.3f} ×",
                "" if ratio is None else f"{ratio[1]:.3f}–{ratio[2]:.3f}",
                _losses(found, result),
            )
        )
    print_columns(rows)
    print(found.how)
    for result in found.results:
        if result.failure is not None:
            print(f"{result.name} failed: {result.failure}")


def _losses(found: StepBench, result: PeerResult) -> str:
    if result is found.reference:
        return "the reference"
    difference = found.loss_difference(result)
    apart = "unknown" if difference is None else f"{difference:.1e} apart"
    return apart if found.agrees(result) else f"DIFFER: {apart}"
