"""How many micro-batches a rank of a pipeline holds at once: whenever a backward pass begins, of every chunk."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from shoal.facts.schedule import SPLIT_BACKWARD, Action, rank_order
from shoal.facts.stages import stages_of_rank


class Moment(NamedTuple):
    """The start of a backward pass, or of its first half."""

    chunk: int  # whose backward pass it is, of the rank's chunks
    held: tuple[int, ...]  # micro-batches of every chunk whose activations are kept, this one included
    deferred: tuple[int, ...]  # and of which only weight gradients are still to be computed
    begun: bool  # whether an earlier backward pass of the chunk has left gradients
    split: bool  # whether this one leaves its weight gradients for later
    done: int  # backward passes of this rank before it


@lru_cache(maxsize=8192)
def moments(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    """Those that no other one exceeds in everything."""
    if pp == 1:
        held = 1
    elif schedule == "gpipe":
        held = micro_batches
    elif schedule == "1f1b":
        held = min(micro_batches, pp - rank)
    else:
        # Beyond it a pipeline is as full as it gets; whole rounds, as some schedules want them.
        enough = micro_batches if micro_batches < 3 * pp else 2 * pp + micro_batches % pp
        played = _played(schedule, pp, chunks, enough, rank)
        missing = (micro_batches - enough) * chunks
        return tuple(one._replace(done=one.done + missing) if one.begun else one for one in played)
    # Later on others have taken the place of those that are through, as long as there are any.
    later = held if pp == 1 and micro_batches > 1 else min(held, micro_batches - 1)
    last = Moment(0, (later,), (0,), True, False, micro_batches - later)
    if later == held:
        return (last,)
    first = Moment(0, (held,), (0,), False, False, 0)
    return (first, last) if later else (first,)


@lru_cache(maxsize=1024)
def _played(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    split = schedule in SPLIT_BACKWARD
    stages = stages_of_rank(pp, chunks, schedule, rank)
    place = {stage: chunk for chunk, stage in enumerate(stages)}
    held, deferred, done = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    # And how many backward passes came before, when it was so for the last time.
    seen: dict[Moment, int] = {}
    for instruction in rank_order(schedule, pp, chunks, micro_batches, rank):
        chunk = place[instruction.stage]
        if instruction.action is Action.FORWARD:
            held[chunk] += 1
        elif instruction.action is Action.WEIGHT:
            deferred[chunk] -= 1
        else:
            half = split and instruction.action is Action.INPUT
            begun = done[chunk] > 0
            seen[Moment(chunk, tuple(held), tuple(deferred), begun, half, 0)] = sum(done)
            done[chunk] += 1
            held[chunk] -= 1
            deferred[chunk] += half
    return tuple(one._replace(done=seen[one]) for one in _outermost(seen))


def _outermost(seen: Iterable[Moment]) -> list[Moment]:
    def exceeds(one: Moment, other: Moment) -> bool:
        return (
            one.chunk == other.chunk
            and one.begun >= other.begun
            and one.split >= other.split
            and all(map(ge, one.held, other.held))
            and all(map(ge, one.deferred, other.deferred))
        )

    # The fullest first: they are what excludes the others.
    kept: list[Moment] = []
    for moment in sorted(seen, key=lambda one: -sum(one.held) - sum(one.deferred) - one.begun - one.split):
        if not any(exceeds(other, moment) for other in kept):
            kept.append(moment)
    return kept
