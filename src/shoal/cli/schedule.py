"""``shoal schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

# Of micro-batches through chunks: a picture of more shows nothing.
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
    """A pipeline's schedule: who computes what when, checked, as a timeline.

    Example: shoal schedule pp=4,schedule=zbv --micro-batches 8

    F is a forward pass, B a backward pass; split, I is the input's gradient and W the weights'. Drawn with F, I and W
    of equal length and B of twice that, and with messages that take no time.

    Parameters
    ----------
    layout
        With pp, schedule and chunks; other keys play no part.
    micro_batches
        Of one step.
    instructions
        Also list every rank's instructions, sends and receives among them.
    svg
        Draw the timeline into this file as well.
    json
        Print one JSON document on standard output.
    """
    from shoal.cli.show import print_json
    from shoal.facts import schedule as schedules
    from shoal.facts.layout import Layout
    from shoal.facts.problem import BadInput
    from shoal.facts.stages import require_chunks
    from shoal.facts.timeline import as_svg, as_text

    given = Layout.parse(layout)
    require_chunks(given.schedule, given.chunks)
    if micro_batches < 1:
        raise BadInput(f"--micro-batches {micro_batches}: at least one is needed", "--micro-batches 8")
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
    print(f"idle {idle:.1%}; micro-batches held at once: {', '.join(map(str, held))}")
    if instructions:
        print(schedules.text(programs))
