"""Idle time of a pipeline: fill, drain and messages.

A full pipeline follows the papers' formulas, which the tests hold against schedules that are played through. One that
never fills, with fewer micro-batches than it takes, is played: the schedule's own list of computations says it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shoal.facts.layout import ONE_CHUNK, V_SHAPED
from shoal.facts.schedules.programs import SPLIT_BACKWARD, compute_order, lengths

# A deeper pipeline that never fills is played at this depth, with as many micro-batches for each rank.
DEEPEST_PLAYED = 4


class Idle(NamedTuple):
    """Of one step, where every stage takes as long as the others."""

    work: float  # idle time, in what one micro-batch takes on a rank, forward and backward
    messages: float  # how many messages the step waits for, one after the other


@cache
def idle(schedule: str, pp: int, chunks: int, micro_batches: int) -> Idle:
    if pp == 1:
        return Idle(0.0, 0.0)
    if follows(schedule, pp, chunks, micro_batches):
        return full(schedule, pp, chunks, micro_batches)
    if micro_batches >= 3 * pp:  # further whole rounds change nothing
        micro_batches = 2 * pp + micro_batches % pp
    if pp <= DEEPEST_PLAYED:
        return played(schedule, pp, chunks, micro_batches)
    fewer = max(1, round(micro_batches * DEEPEST_PLAYED / pp))
    shallow = played(schedule, DEEPEST_PLAYED, chunks, fewer)
    deeper = (pp - 1) / (DEEPEST_PLAYED - 1)
    return Idle(shallow.work * deeper, shallow.messages * deeper)


def follows(schedule: str, pp: int, chunks: int, micro_batches: int) -> bool:
    """Whether the formulas hold: a pipeline that fills and, where chunks take turns, whole rounds of micro-batches."""
    if schedule in ONE_CHUNK:
        return True
    if schedule in V_SHAPED:
        return micro_batches >= 2 * pp
    return micro_batches >= pp and (micro_batches % pp == 0 or (schedule == "zb" and chunks == 1))


def full(schedule: str, pp: int, chunks: int, micro_batches: int) -> Idle:
    """gpipe and 1f1b at any number of micro-batches, the others once they are full."""
    others = pp - 1
    if schedule == "gpipe":
        return Idle(others, 2.0 * others)
    if schedule == "1f1b":
        # In the steady state a rank waits for its neighbour's answer every time.
        return Idle(others, max(2.0 * others, 2.0 * others * micro_batches / pp + 2.0 * (pp - 2)))
    work = others / (3 * chunks) if schedule in SPLIT_BACKWARD else others / chunks
    messages = {
        "interleaved": 2 * chunks * pp - 2,
        "zb": 4 * others + (chunks - 1) * pp,
        "zbv": 5 * pp - 7,
        "dualpipev": 4 * others,
    }
    return Idle(work, float(messages[schedule]))


@cache
def played(schedule: str, pp: int, chunks: int, micro_batches: int) -> Idle:
    order = compute_order(schedule, pp, chunks, micro_batches)
    busy = 3.0 * chunks * micro_batches
    plain, slowed = lengths(order, (0.0, 0.01))
    return Idle((plain - busy) / (3 * chunks), (slowed - plain) / 0.01)
