"""``shoal replay``: a past step of a run again, compared with what the run recorded."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.prove.replay import ReplayVerdict


def replay(
    run: Path,
    /,
    *,
    step: Annotated[int, Parameter(validator=Number(gte=1))],
    layout: str = "own",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Repeat a past step from the nearest checkpoint, and those up to the run's next one; compare everything.

    Example: shoal replay runs/tiny --step 1234 --layout dp=1

    Losses and gradient norms against metrics.jsonl; then weights and optimizer states against the next checkpoint, with
    the tensor that differs most and the rank that held it. Names the first tensor that is not finite, and the samples
    of the step with the largest loss. The run itself is only read. Exit code 1 if anything differs or is not finite.

    Parameters
    ----------
    run
        A run's directory.
    step
        The step to repeat.
    layout
        The parallel layout, as in dp=1; by default that of the run, in which results are equal to the bit.
    json
        Print one JSON document.
    """
    from shoal.cli.show import print_json
    from shoal.launch.report import FAILED, FINISHED
    from shoal.prove.replay import replay as repeat

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    verdict = repeat(run, step, layout, os.environ.get("CUDA_VISIBLE_DEVICES"), console)
    if json:
        print_json({"run": str(run), "step": step, "same": verdict.same, **asdict(verdict)})
    else:
        _tell(verdict)
    return FINISHED if verdict.same else FAILED


def _tell(verdict: ReplayVerdict) -> None:
    from shoal.cli.show import print_columns

    begun = f"the checkpoint of step {verdict.start}" if verdict.start else "the first weights"
    how = "to the bit" if verdict.exact else "within rounding"
    print(f"replayed from {begun}, layout {verdict.layout}, compared {how}")
    rows: list[tuple[str, ...]] = [("step", "loss then", "loss now", "gradient norm then", "now", "")]
    for one in verdict.steps:
        numbers = [
            "not finite" if side[name] is None else f"{side[name]:.6f}"
            for name in ("loss", "grad_norm")
            for side in (one.recorded, one.replayed)
        ]
        note = "identical" if one.identical else "the same" if one.same else "differs"
        rows.append((str(one.step), *numbers, note))
    print_columns(rows)
    if verdict.not_finite is not None:
        bad = verdict.not_finite
        print(f"not finite first: {bad.what} of {bad.name}, on rank {bad.rank} of the replay")
    if verdict.worst is not None:
        worst = verdict.worst
        where = f"{worst.state} of {worst.tensor}{list(worst.index)}, held by rank {worst.rank}"
        print(
            f"checkpoint of step {verdict.checkpoint}: {verdict.tensors} tensors differ, most of all {where}:"
        )
        print(f"  {worst.recorded:.9g} in the run, {worst.replayed:.9g} now")
    elif verdict.checkpoint is not None:
        print(f"checkpoint of step {verdict.checkpoint}: every tensor is the same")
    if verdict.samples:
        worst_samples = ", ".join(
            f"sample {one.sample} (row {one.row}): {one.loss:.4f}" for one in verdict.samples
        )
        print(f"largest losses of the step: {worst_samples}")
