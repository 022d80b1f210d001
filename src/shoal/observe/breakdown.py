"""Break a profiled step's time down by cause; every moment counts once, so the parts add up."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from shoal.observe.intervals import Interval, common, total, union, without
from shoal.observe.kinds import KINDS
from shoal.observe.trace import Computation, Recording

OPTIMIZER, RECOMPUTE = "optimizer", "recompute"


@dataclass(frozen=True)
class TimeBreakdown:
    """One rank's seconds. ``communication`` is not part of the sum, since most of it may overlap computation."""

    seconds: float
    kinds: dict[str, float]  # forward and backward computation, by kind
    recompute: float
    optimizer: float  # everything computed after the last backward pass: norm, clipping, update
    bubble: float  # idle while another stage of the pipeline works
    input_wait: float  # idle until all ranks have their batches
    exposed: dict[str, float]  # idle while ranks communicate: by collective and, if the trace tells, by group
    host_gaps: float  # idle for none of these reasons: the device waits for Python
    communication: float  # total communication time, without messages between stages

    @property
    def compute(self) -> float:
        return sum(self.kinds.values())

    @property
    def exposed_comm(self) -> float:
        return sum(self.exposed.values())


def extents(recording: Recording) -> dict[str, Interval]:
    """When the device ran each computation of the schedule: from its first kernel to the end of its last."""
    ranges = sorted((start, end, name) for name, (start, end) in recording.instructions.items())
    starts = [start for start, _, _ in ranges]
    found: dict[str, Interval] = {}
    for work in recording.work:
        place = bisect_right(starts, work.issued) - 1
        if place < 0 or work.issued > ranges[place][1]:
            continue
        name = ranges[place][2]
        # A message is not a computation, though allocating memory for one may look like it.
        if name[0] in "FBIW":
            start, end = found.get(name, (work.start, work.end))
            found[name] = (min(start, work.start), max(end, work.end))
    return found


def breakdown(recording: Recording, pipeline: Interval | None = None) -> TimeBreakdown:
    """Divide the step. ``pipeline``: from the first to the last computation of any of its ranks, if there is one."""
    left = [recording.step]

    def take(pieces: list[Interval]) -> float:
        """The part of these that is not claimed yet."""
        nonlocal left
        mine = common(left, union(pieces))
        left = without(left, mine)
        return total(mine)

    updating = max((end for _, end in recording.instructions.values()), default=recording.step[1])
    groups: dict[str, list[Interval]] = {name: [] for name in (*KINDS, RECOMPUTE, OPTIMIZER)}
    for work in recording.work:
        groups[_group(work, updating)].append((work.start, work.end))
    seconds = {name: take(pieces) for name, pieces in groups.items()}
    bubble = take(without([pipeline], union(extents(recording).values()))) if pipeline else 0.0
    input_wait = take(recording.waiting_for_input)
    talks: dict[str, list[Interval]] = {}
    for talk in recording.talks:
        talks.setdefault(f"{talk.operation} {talk.group}".rstrip(), []).append((talk.start, talk.end))
    exposed = {name: take(pieces) for name, pieces in talks.items()}
    return TimeBreakdown(
        seconds=recording.step[1] - recording.step[0],
        kinds={name: seconds[name] for name in KINDS if seconds[name]},
        recompute=seconds[RECOMPUTE],
        optimizer=seconds[OPTIMIZER],
        bubble=bubble,
        input_wait=input_wait,
        exposed={name: idle for name, idle in exposed.items() if idle},
        host_gaps=total(left),
        communication=total(union(piece for pieces in talks.values() for piece in pieces)),
    )


def _group(work: Computation, updating: float) -> str:
    if work.issued >= updating:
        return OPTIMIZER
    return RECOMPUTE if work.repeated else work.kind
