"""The time of a step: its parts, predicted and measured, and how it changed over the run."""

from __future__ import annotations

from shoal.report.bars import SPENT, Bar, numbers_of, stacked
from shoal.report.columns import is_number
from shoal.report.markup import Markup, chart, empty, figure, grid, listed
from shoal.report.numbers import duration
from shoal.report.run.curves import Chart, Drawn, made
from shoal.report.run_files import RunFiles, lookup

# A run's own rows only say how long a step took and how long it waited for input.
KINDS = {**SPENT, "input_wait": ("waiting for input", 2), "undivided": ("not broken down", 9)}


def bars(run: RunFiles) -> list[tuple[Bar, str]]:
    found = []
    for name, tree, keys, source in (
        ("predicted", run.plan, ("step",), "plan.json: step"),
        ("measured by shoal profile", run.profile, ("measured", "step"), "profile.json: measured.step"),
    ):
        step = lookup(tree, *keys)
        seconds = lookup(step, "seconds")
        if is_number(seconds):
            parts = {part: step[part] for part in SPENT if is_number(step.get(part))}
            found.append((Bar(name, parts, seconds), source))
    usual = run.metrics.usual("step_s")
    if usual is not None:
        waited = run.metrics.usual("input_wait_s") or 0.0
        bar = Bar(
            "measured, median step", {"undivided": max(0.0, usual - waited), "input_wait": waited}, usual
        )
        found.append((bar, "metrics.jsonl: step_s, input_wait_s"))
    return found


def section(drawn: Drawn) -> tuple[Markup, dict[str, Chart]]:
    run = drawn.run
    found = bars(run)
    if not found:
        return empty("No step has been recorded, and the run has no plan.json."), {}
    every = [bar for bar, _ in found]
    text = ""
    if not run.profile:
        text = "To break a measured step down into its parts: shoal profile."
    measured = [place for place, bar in enumerate(every) if bar.name != "predicted"]
    compared = (0, measured[0]) if measured and every[0].name == "predicted" else None
    content = stacked(every, KINDS, duration) + numbers_of(every, KINDS, duration, compared, "step")
    sources = [source for _, source in found]
    verdict = run.profile.get("verdict")
    if isinstance(verdict, list) and verdict:
        content += listed([str(one)[:400] for one in verdict[:12]])
        sources.append("profile.json: verdict")
    parts = figure(Markup(content), "Parts of a step", sources, text, wide=True)
    fields = (
        ("step_s", "step", 1),
        ("predicted_step_s", "predicted", 6),
        ("input_wait_s", "waiting for input", 2),
        ("commit_wait_s", "waiting for a checkpoint", 3),
    )
    lines = [
        drawn.field(name, words, colour, dash=colour == 6, exact=colour == 6)
        for name, words, colour in fields
    ]
    curve = made([drawn], lines, format="seconds", zero=True)
    if curve is None:
        return grid(parts), {}
    sources = ["metrics.jsonl: step_s, predicted_step_s, input_wait_s, commit_wait_s"]
    beneath = "Evaluation and checkpoint writing are not part of a step."
    over_steps = figure(chart("step_s", "Step time"), "Step time over the run", sources, beneath, wide=True)
    return grid(parts, over_steps), {"step_s": curve}
