"""``shoal parity``: compare layouts with one process."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.prove.parity import Parity, ParityVerdict


def parity(
    config: Path | None = None,
    /,
    *,
    layouts: str = "quick",
    steps: int = 3,
    precision: Literal["fp64", "fp32", "both", "bf16", "fp8"] = "both",
    strict: Annotated[bool, Parameter(negative=())] = False,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compare the same run in each layout with one process: losses, gradients, weights, first point of difference.

    Example: shoal parity examples/tiny.toml --layouts "fsdp=2;tp=2;dp=2,pp=2,schedule=zbv"

    Every layout runs for real, one process per rank; on CPU, any machine runs any world size. If a layout differs,
    parity narrows the difference down to the strategy that causes it. Exit code 1 if a layout differs.

    Parameters
    ----------
    config
        A TOML file; without one the embedded default is run.
    layouts
        Layouts separated by ";", or quick (one of each strategy, up to 4 ranks), 4d (four and five axes at once, 8
        and 16 ranks), experts (each way to spread experts, and 4d), or full (every value, every pair, 3D, 4D and 5D;
        takes many minutes). All leave out layouts that the model or the batch does not allow.
    steps
        How many steps to run.
    precision
        fp64 must agree to 1e-12, in the first step's gradients and in losses (relative where above 1); fp32, bf16
        and fp8 to their rounding; both: fp64 and fp32. bf16 with compile.enabled=true tests a run as it ships: compiled
        blocks, fused loss, fp32 masters. In fp8 a layout is compared with one process of the same micro-batches.
    strict
        Demand equal bits, as run.strict does (dp, fsdp, pp), in fp32.
    set
        Override one value, as in recipe.lr=0.001. May be given several times.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    from shoal.cli.show import counted, print_json, warn_of_length
    from shoal.facts.config.file import load
    from shoal.facts.problem import BadInput
    from shoal.launch.report import FAILED, FINISHED
    from shoal.plan.resolve import resolve
    from shoal.prove import prepare

    overrides = [*(set or []), *(["run.strict=true"] if strict else [])]
    given = load(config, overrides, "dp=1")
    loaded = given.config
    if loaded.run.strict and precision == "fp8":
        raise BadInput(
            "--precision fp8 in strict mode: scales of activations depend on the micro-batch",
            "leave out --strict",
        )
    precisions: list[str] = (
        ["fp32"] if loaded.run.strict else ["fp64", "fp32"] if precision == "both" else [precision]
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with given.located():
        job = resolve(loaded, visible)
        chosen = prepare.layouts(layouts, job)
        dataset = prepare.ready(job, chosen, precisions, steps, visible, console)
    warn_of_length(job.model, loaded.recipe.seq)
    where = f"{job.model.name} on {job.cluster.device.name}"
    console.print(
        f"{where}: {counted(len(chosen), 'layout')}, {counted(steps, 'step')} each, compared with one process",
        markup=False,
    )

    from shoal.prove.parity import Prover

    proofs = []
    for kind in precisions:
        console.print(f"{kind}: {'bit by bit' if loaded.run.strict else 'within rounding'}", markup=False)
        with TemporaryDirectory(prefix="shoal-parity-") as folder:
            prover = Prover(loaded, dataset, steps, kind, Path(folder), visible=visible)
            layouts_and_micro = [*chosen, *prover.micro_batches(chosen)]
            proofs.append(prover.prove(layouts_and_micro, lambda verdict: _tell(verdict, console)))
    if json:
        print_json(_document(proofs))
    failed = [verdict for proof in proofs for verdict in proof.verdicts if not verdict.ok]
    if not json:
        print(
            f"{len(failed)} of {sum(len(proof.verdicts) for proof in proofs)} differ"
            if failed
            else "all equal"
        )
    return FAILED if failed else FINISHED


def _tell(verdict: ParityVerdict, console: Console) -> None:
    worst = (verdict.max_loss_diff, verdict.max_grad_diff, verdict.max_param_diff)
    names = ("loss", "gradient", "weight")
    numbers = "  ".join(f"{name} {value:7.1e}" for name, value in zip(names, worst, strict=True))
    mark = "equal " if verdict.bit_identical else "ok    " if verdict.ok else "DIFFER"
    console.print(f"{mark}  {verdict.layout!s:48}  {numbers}  {verdict.seconds:5.1f} s", markup=False)
    if not verdict.ok:
        console.print(f"        {verdict.reason}; {verdict.strategy}: {verdict.file}", markup=False)


def _row(verdict: ParityVerdict) -> dict[str, Any]:
    """The first of all differing tensors, and their number."""
    row = {**asdict(verdict), "layout": str(verdict.layout), "differing": len(verdict.differing)}
    return {**row, "first_difference": asdict(verdict.differing[0]) if verdict.differing else None}


def _document(proofs: list[Parity]) -> dict[str, Any]:
    """CONTRACT's fields are the first precision's; a second one is listed beside them."""
    first, *others = [
        {
            "steps": proof.steps,
            "precision": proof.precision,
            "reference": {"losses": proof.reference},
            "layouts": [_row(verdict) for verdict in proof.verdicts],
        }
        for proof in proofs
    ]
    return {**first, "also": others, "ok": all(verdict.ok for proof in proofs for verdict in proof.verdicts)}
