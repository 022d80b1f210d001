"""Pipeline schedules as data: a list of instructions per rank that is printed, checked, simulated and executed.

``compute_order`` orders the computations, ``instructions`` adds the messages between ranks, ``check`` proves that the
result cannot deadlock, ``simulate`` returns its timeline and ``in_flight`` its activations.
"""

from __future__ import annotations

from functools import cache

from shoal.facts.schedules.check import check
from shoal.facts.schedules.instruction import RECEIVES, SENDS, Action, Instruction, Program, ScheduleError
from shoal.facts.schedules.messages import instructions, rank_program
from shoal.facts.schedules.orders import compute_order, rank_order
from shoal.facts.schedules.simulate import (
    Event,
    Timeline,
    bubble,
    in_flight,
    lengths,
    simulate,
    unit_durations,
)

# Schedules that split weight gradients from the backward pass, to fill bubbles with them.
SPLIT_BACKWARD = ("zb", "zbv", "dualpipev")

__all__ = [
    "RECEIVES",
    "SENDS",
    "SPLIT_BACKWARD",
    "Action",
    "Event",
    "Instruction",
    "Program",
    "ScheduleError",
    "Timeline",
    "bubble",
    "check",
    "compute_order",
    "in_flight",
    "instructions",
    "lengths",
    "programs",
    "rank_order",
    "rank_program",
    "simulate",
    "text",
    "unit_durations",
]


@cache
def programs(schedule: str, pp: int, chunks: int, micro_batches: int) -> list[Program]:
    """Every rank's instructions; a schedule that would deadlock is rejected here, before a run."""
    made = instructions(schedule, pp, chunks, micro_batches)
    check(made, pp, chunks, schedule, micro_batches)
    return made


def text(programs: list[Program]) -> str:
    """One line per rank."""
    return "\n".join(
        f"rank {rank}: {' '.join(str(instruction) for instruction in program)}"
        for rank, program in enumerate(programs)
    )
