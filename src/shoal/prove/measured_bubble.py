"""A pipeline's measured idle time, next to what its schedule implies for the measured compute times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.facts.layout import Layout
from shoal.facts.layout.ranks import line
from shoal.facts.schedules.programs import Event, Instruction, Timeline, bubble, programs, simulate

if TYPE_CHECKING:
    from shoal.prove.profile_rank import RankProfile


@dataclass(frozen=True)
class MeasuredPipeline:
    """Fractions of the time of all ranks, from the first computation to the end of the last."""

    measured: float
    scheduled: float  # the same computations, each started as soon as its inputs exist
    even: float  # the schedule's own bubble, as if all stages took equally long
    busy: list[float]  # seconds that each rank of the pipeline computes

    @property
    def apart(self) -> float:
        """How much more the pipeline idles than its schedule implies; 0.15 is 15 % more."""
        return self.measured / self.scheduled - 1 if self.scheduled else 0.0


def compare(layout: Layout, micro_batches: int, seen: Sequence[RankProfile]) -> MeasuredPipeline | None:
    """For the first rank's pipeline; None if there is none."""
    if layout.pp == 1:
        return None
    ranks = [seen[number] for number in line(0, "pp", layout)]
    plan = programs(layout.schedule, layout.pp, layout.chunks, micro_batches)
    when = {name: extent for rank in ranks for name, extent in rank.computations.items()}
    begin = min(start for start, _ in when.values())

    def seconds(instruction: Instruction) -> float:
        # Weight gradients computed in the backward pass leave nothing for later.
        start, end = when.get(str(instruction), (0.0, 0.0))
        return end - start

    real = Timeline(
        [
            [
                Event(instruction, when[str(instruction)][0] - begin, when[str(instruction)][1] - begin)
                for instruction in program
                if str(instruction) in when
            ]
            for program in plan
        ]
    )
    return MeasuredPipeline(
        measured=bubble(real),
        scheduled=bubble(simulate(plan, seconds)),
        even=bubble(simulate(plan)),
        busy=[sum(event.end - event.start for event in events) for events in real.ranks],
    )
