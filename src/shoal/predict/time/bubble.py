"""Idle time of a pipeline: fill, drain and messages.

A full pipeline follows the papers' formulas, which tests compare with simulated schedules. One that never fills, for
lack of micro-batches, is simulated from the schedule's own list of computations.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shoal.facts.layout import ONE_CHUNK, V_SHAPED
from shoal.facts.schedules.programs import SPLIT_BACKWARD, compute_order, lengths

# A deeper pipeline that never fills is simulated at this depth, with as many micro-batches per rank.
DEEPEST_PLAYED = 4


class Idle(NamedTuple):
    """Per step, with all stages equally slow."""

    work: float  # idle time, in units of one micro-batch's forward and backward on a rank
    messages: float  # number of messages that the step waits for, one after another


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
    """Whether the formulas hold: the pipeline fills and, where chunks take turns, micro-batches form whole rounds."""
    if schedule in ONE_CHUNK:
        return True
    if schedule in V_SHAPED:
        return micro_batches >= 2 * pp
    return micro_batches >= pp and (micro_batches % pp == 0 or (schedule == "zb" and chunks == 1))


def full(schedule: str, pp: int, chunks: int, micro_batches: int) -> Idle:
    """The formulas: for gpipe and 1f1b at any number of micro-batches, for the others once they are full."""
    others = pp - 1
    if schedule == "gpipe":
        return Idle(others, 2.0 * others)
    if schedule == "1f1b":
        # In the steady state a rank waits for its neighbour's reply every time.
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
