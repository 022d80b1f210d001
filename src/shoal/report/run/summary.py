"""A run in a few numbers: the top of its report, the columns of a comparison, the JSON document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from shoal.facts.losses import LOSSES
from shoal.report.columns import Columns, rounded
from shoal.report.events import FAULT, RESTART, RunEvent
from shoal.report.markup import Tile
from shoal.report.numbers import count, difference, duration, number, percent, size
from shoal.report.run_files import RunFiles, lookup


@dataclass(frozen=True)
class RunSummary:
    """Every number is from the run's own files."""

    name: str
    path: str
    state: str
    step: int
    steps: int | None
    layout: str | None
    world: int | None
    model: str | None
    parameters: int | None
    loss: float | None
    heldout_loss: float | None
    best_heldout_loss: float | None
    best_step: int | None
    tokens: float | None
    step_s: float | None  # the median, without the first steps
    predicted_step_s: float | None
    guessed: bool  # the prediction used rates that were never measured
    tokens_per_s: float | None
    mfu: float | None
    memory_peak: float | None
    training_s: float  # sum over all steps
    faults: dict[str, int]
    restarts: int
    version: str | None
    mean_over: str = "token"
    validated_on: str = ""  # the set, if there are several

    def tiles(self) -> list[Tile]:
        of = f"of {self.steps:,}" if self.steps is not None else ""
        found = [Tile("Step", f"{self.step:,}", "metrics.jsonl: step", of)]
        if self.loss is not None:
            over = f"nats/{self.mean_over}, last step"
            found.append(Tile("Training loss", f"{self.loss:.4f}", "metrics.jsonl: loss", over))
        if self.heldout_loss is not None:
            best = self.best_heldout_loss
            lowest = f"lowest {best:.4f}, step {self.best_step:,}" if best is not None else ""
            from_ = "metrics.jsonl: heldout_loss"
            found.append(
                Tile("Validation loss", f"{self.heldout_loss:.4f}", from_, f"{self.validated_on}{lowest}")
            )
        if self.tokens_per_s is not None:
            share = f"MFU {percent(self.mfu)}" if self.mfu is not None else "median"
            from_ = "metrics.jsonl: tokens_per_s, mfu"
            found.append(Tile("Tokens/s", count(self.tokens_per_s), from_, share))
        if self.step_s is not None:
            off = (
                "a guess, not calibrated" if self.guessed else difference(self.predicted_step_s, self.step_s)
            )
            told = f"predicted {duration(self.predicted_step_s)} ({off})"
            from_ = "metrics.jsonl: step_s, predicted_step_s"
            found.append(
                Tile("s/step", duration(self.step_s), from_, told if self.predicted_step_s else "median")
            )
        if self.memory_peak is not None:
            from_ = "metrics.jsonl: memory_peak"
            found.append(Tile("Peak memory", size(self.memory_peak), from_, "first rank"))
        if self.tokens is not None:
            from_, took = "metrics.jsonl: tokens, step_s", f"{duration(self.training_s)} of steps"
            found.append(Tile("Tokens", count(self.tokens), from_, took))
        total = sum(self.faults.values())
        kinds = ", ".join(f"{kind} {many}" for kind, many in sorted(self.faults.items())[:3])
        found.append(Tile("Faults", str(total), "faults.jsonl: kind", kinds or f"{self.restarts} restarts"))
        return found

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def summary(run: RunFiles, happened: list[RunEvent]) -> RunSummary:
    rows = run.metrics

    heldout = [
        (value, step)
        for value, step in zip(rows.column("heldout_loss"), rows.steps, strict=True)
        if value is not None
    ]
    lowest, best = min(heldout, default=(None, None))
    parameters = run.manifest.get("parameters")
    name = lookup(run.manifest, "model", "name") or lookup(run.config, "model", "preset")
    return RunSummary(
        name=run.name,
        path=str(run.path),
        state=run.state,
        step=run.last_step,
        steps=run.steps,
        layout=str(run.layout) if run.layout is not None else None,
        world=run.world,
        model=str(name) if name else None,
        parameters=parameters if isinstance(parameters, int) else None,
        loss=rows.column("loss")[-1] if rows.steps else None,
        heldout_loss=heldout[-1][0] if heldout else None,
        best_heldout_loss=lowest,
        best_step=best,
        tokens=rows.last("tokens"),
        step_s=rows.usual("step_s"),
        predicted_step_s=rows.last("predicted_step_s"),
        guessed=run.plan.get("guess") is True,
        tokens_per_s=rows.usual("tokens_per_s"),
        mfu=rows.usual("mfu"),
        memory_peak=max(rows.values("memory_peak"), default=None),
        training_s=float(rounded(sum(rows.values("step_s"))) or 0.0),
        faults=dict(Counter(one.what for one in happened if one.kind == FAULT)),
        restarts=sum(one.kind == RESTART for one in happened),
        version=str(run.manifest["shoal"]) if "shoal" in run.manifest else None,
        mean_over=counted(rows),
        validated_on=_watched(run),
    )


def counted(rows: Columns) -> str:
    """What the loss is a mean over: tokens or pairs."""
    measured = (one for one in LOSSES.values() if one.measures and set(one.measures) <= rows.numbers.keys())
    return next((one.counted for one in measured), "token")


def _watched(run: RunFiles) -> str:
    """The validation set whose loss ``heldout_loss`` repeats, if there are several."""
    sets = {name: found for name, found in run.metrics.validation.items() if found}
    if len(sets) < 2:
        return ""
    losses = run.metrics.column("heldout_loss")
    alike = (name for name, found in sets.items() if all(losses[place] == value for place, value in found))
    return next((f"{name}: " for name in sorted(alike)), "")


def said(one: RunSummary) -> dict[str, str]:
    """The rows of a comparison."""
    of = f" of {one.steps:,}" if one.steps is not None else ""
    return {
        "state": one.state,
        "model": one.model or "–",
        "parameters": count(one.parameters),
        "layout": one.layout or "–",
        "ranks": str(one.world or "–"),
        "steps": f"{one.step:,}{of}",
        "tokens": count(one.tokens),
        "training loss": number(one.loss),
        "validation loss": number(one.heldout_loss),
        "lowest validation loss": number(one.best_heldout_loss),
        "s/step, median": duration(one.step_s),
        "s/step, predicted": duration(one.predicted_step_s) + (" (a guess)" if one.guessed else ""),
        "tokens/s, median": count(one.tokens_per_s),
        "MFU, median": percent(one.mfu),
        "peak memory, first rank": size(one.memory_peak),
        "time of steps": duration(one.training_s),
        "faults": str(sum(one.faults.values())),
        "restarts": str(one.restarts),
        "Shoal": one.version or "–",
    }
