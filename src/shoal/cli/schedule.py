"""``shoal schedule``: check a pipeline schedule and draw it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

# Micro-batches times chunks: a larger picture shows nothing.
MOST_PASSES = 20_000


def schedule(
    layout: str,
    /,
    *,
    micro_batches: int = 8,
    instructions: Annotated[bool, Parameter(negative=())] = False,
    svg: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Check a pipeline schedule and draw its timeline: which rank computes what, and when.

    Example: shoal schedule pp=4,schedule=zbv --micro-batches 8

    F is a forward pass, B a backward pass. Split backward passes show as I (input gradient) and W (weight gradient).
    F, I and W are drawn with equal length, B with twice that; messages take no time.

    Parameters
    ----------
    layout
        The layout: pp, schedule and chunks; other keys are ignored.
    micro_batches
        Micro-batches per step.
    instructions
        Also list every rank's instructions, including sends and receives.
    svg
        Also write the timeline to this file as SVG.
    json
        Print one JSON document on standard output.
    """
    from shoal.cli.show import print_json
    from shoal.facts.layout import Layout
    from shoal.facts.layout.stages import require_chunks
    from shoal.facts.problem import BadInput
    from shoal.facts.schedules import programs as schedules
    from shoal.facts.schedules.timeline import as_svg, as_text

    given = Layout.parse(layout)
    require_chunks(given.schedule, given.chunks)
    if micro_batches < 1:
        raise BadInput(f"--micro-batches {micro_batches}: must be 1 or more", "--micro-batches 8")
    if given.pp * given.chunks * micro_batches > MOST_PASSES:
        raise BadInput(
            f"{layout} with {micro_batches} micro-batches: more than {MOST_PASSES:,} passes of a chunk to draw",
            "fewer stages, chunks or --micro-batches: the pattern repeats",
        )
    programs = schedules.programs(given.schedule, given.pp, given.chunks, micro_batches)
    timeline = schedules.simulate(programs)
    if svg is not None:
        svg.write_text(as_svg(timeline), encoding="utf-8")
    idle, held = schedules.bubble(timeline), schedules.in_flight(programs)
    if json:
        listed = [[str(instruction) for instruction in program] for program in programs]
        print_json({"layout": str(given), "idle": idle, "in_flight": held, "programs": listed})
        return
    print(as_text(timeline))
    print(f"idle {idle:.1%}; micro-batches in flight: {', '.join(map(str, held))}")
    if instructions:
        print(schedules.text(programs))
