"""Simulate a schedule: its timeline, idle time and micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.facts.schedules.instruction import (
    Action,
    Instruction,
    Program,
    ScheduleError,
    StageTensor,
    tensor_made,
    tensor_needed,
)


@dataclass(frozen=True, slots=True)
class Event:
    """One computation, with its start and end time."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every rank computes when, from 0 to the end of the last computation."""

    ranks: list[list[Event]]

    @property
    def end(self) -> float:
        return max((events[-1].end for events in self.ranks if events), default=0.0)


def unit_durations(instruction: Instruction) -> float:
    """Unit durations as in the papers: F = I = W = 1, and a whole backward is the sum of its halves."""
    return 2.0 if instruction.action is Action.BACKWARD else 1.0


def simulate(
    programs: list[Program], durations: Callable[[Instruction], float] = unit_durations, transfer: float = 0.0
) -> Timeline:
    """Run the computations of all ranks, each as soon as its rank is free and its inputs have arrived.

    ``transfer`` is the time a tensor takes to another rank, overlapped with computation. Programs may come with or
    without sends and receives, since dependencies follow from the stages.
    """
    ranks = play(computations(programs), durations, transfer)
    for rank, (program, events) in enumerate(zip(computations(programs), ranks, strict=True)):
        if len(events) < len(program):
            raise ScheduleError(f"rank {rank}: {program[len(events)]} waits for ever; check() says why")
    return Timeline(ranks)


def lengths(programs: list[Program], transfers: Sequence[float]) -> list[float]:
    """End times of ``simulate`` for several transfer times: builds no timeline, for a planner that asks often."""
    work = computations(programs)
    holder = {instruction.stage: rank for rank, program in enumerate(work) for instruction in program}
    # Per computation: what it needs, whether that comes from another rank, its duration, what it produces.
    steps = [
        [
            (
                needed,
                needed is not None and holder[needed.stage] != rank,
                unit_durations(one),
                tensor_made(one),
            )
            for one, needed in ((one, tensor_needed(one, len(holder))) for one in program)
        ]
        for rank, program in enumerate(work)
    ]
    return [_length(steps, transfer) for transfer in transfers]


def _length(
    steps: list[list[tuple[StageTensor | None, bool, float, StageTensor | None]]], transfer: float
) -> float:
    made: dict[StageTensor | None, float] = {None: 0.0}
    ends, places = [0.0] * len(steps), [0] * len(steps)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(steps):
            place, end = places[rank], ends[rank]
            while place < len(program) and program[place][0] in made:
                needed, travels, takes, makes = program[place]
                end = max(end, made[needed] + (transfer if travels else 0.0)) + takes
                if makes is not None:
                    made[makes] = end
                place += 1
            moved = moved or place > places[rank]
            places[rank], ends[rank] = place, end
    if any(place < len(program) for place, program in zip(places, steps, strict=True)):
        raise ScheduleError("a rank waits for ever; check() says why")
    return max(ends)


def computations(programs: list[Program]) -> list[Program]:
    """The programs without their messages."""
    return [[instruction for instruction in program if instruction.computes] for program in programs]


def play(
    work: list[Program], durations: Callable[[Instruction], float] = unit_durations, transfer: float = 0.0
) -> list[list[Event]]:
    """Play every rank's computations as far as they can run, with their times."""
    holder = {instruction.stage: rank for rank, program in enumerate(work) for instruction in program}
    made: dict[StageTensor, float] = {}
    ranks: list[list[Event]] = [[] for _ in work]
    moved = True
    while moved:
        moved = False
        for rank, (program, events) in enumerate(zip(work, ranks, strict=True)):
            while len(events) < len(program):
                instruction = program[len(events)]
                start = events[-1].end if events else 0.0
                needed = tensor_needed(instruction, len(holder))
                if needed is not None:
                    if needed not in made:
                        break
                    travel = transfer if holder[needed.stage] != rank else 0.0
                    start = max(start, made[needed] + travel)
                events.append(Event(instruction, start, start + durations(instruction)))
                result = tensor_made(instruction)
                if result is not None:
                    made[result] = events[-1].end
                moved = True
    return ranks


def bubble(timeline: Timeline) -> float:
    """The share of all ranks' time, from the first start to the last end, that is idle."""
    total = timeline.end * len(timeline.ranks)
    busy = sum(event.end - event.start for events in timeline.ranks for event in events)
    return 1.0 - busy / total if total else 0.0


def in_flight(programs: list[Program]) -> list[int]:
    """The most activations, each of one stage and one micro-batch, that every rank holds at once.

    Held from the forward to the end of the backward. With a split backward, activations count in full until the weight
    gradients are computed, which is an upper bound: between the halves only the inputs of the matrix products and the
    gradients of their outputs are needed, no longer what attention and norms saved.
    """
    peaks = []
    for program in programs:
        held = peak = 0
        for instruction in program:
            if instruction.action is Action.FORWARD:
                held += 1
                peak = max(peak, held)
            elif instruction.action in (Action.BACKWARD, Action.WEIGHT):
                held -= 1
        peaks.append(peak)
    return peaks
