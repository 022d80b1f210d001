"""The pipeline's timeline: what each stage computes when, by the schedule's own instruction list."""

from __future__ import annotations

from shoal.facts.problem import BadInput
from shoal.facts.schedules.instruction import ScheduleError
from shoal.facts.schedules.programs import bubble, programs, simulate
from shoal.report.columns import is_number
from shoal.report.markup import Markup, empty, figure
from shoal.report.numbers import percent
from shoal.report.run_files import RunFiles, lookup
from shoal.report.timeline import drawn

# The most computations in one picture; more micro-batches repeat the pattern.
MOST_BOXES = 1500


def section(run: RunFiles) -> Markup:
    layout = run.layout
    if layout is None or layout.pp == 1:
        return Markup("")
    found = run.plan.get("accumulation")
    micro_batches = int(found) if is_number(found) and found is not None and found >= 1 else 1
    most = max(layout.pp, MOST_BOXES // (2 * layout.pp * layout.chunks))
    shown = min(micro_batches, most)
    try:
        timeline = simulate(programs(layout.schedule, layout.pp, layout.chunks, shown))
    except (ScheduleError, BadInput, ValueError) as error:
        return empty(f"The schedule of {layout} cannot be drawn: {error}")
    words = [
        f"Schedule {layout.schedule}, {layout.pp} stages"
        + (f" of {layout.chunks} chunks" if layout.chunks > 1 else "")
        + f", {micro_batches} micro-batches"
        + (f", of which the first {shown} are drawn" if shown < micro_batches else "")
        + ". A forward pass is drawn as one unit, a backward pass as two: by that the schedule is idle for "
        + f"{percent(bubble(timeline))} of the time."
    ]
    sources = ["metrics.jsonl: layout", "plan.json: accumulation, step.bubble"]
    seconds, idle = lookup(run.plan, "step", "seconds"), lookup(run.plan, "step", "bubble")
    if is_number(seconds) and is_number(idle) and seconds:
        words.append(f"Predicted: {percent(idle / seconds)} of a step.")
    measured = lookup(run.profile, "pipeline", "measured")
    if is_number(measured):
        words.append(f"Measured by shoal profile: {percent(measured)} of the pipeline's time.")
        sources.append("profile.json: pipeline.measured")
    return figure(drawn(timeline), "Timeline of a step", sources, " ".join(words), wide=True)
