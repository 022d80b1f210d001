"""How many micro-batches a rank of a pipeline holds at once: whenever a backward pass begins, of every stage."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from shoal.facts.layout import V_SHAPED
from shoal.facts.layout.stages import stages_of_rank
from shoal.facts.schedules.programs import RECEIVES, SENDS, SPLIT_BACKWARD, Action, rank_program


class Begun(IntEnum):
    """What earlier backward passes have left of a stage's gradients."""

    NOTHING = 0
    ENDS = 1  # those of embedding and head alone: their blocks' were put off
    ALL = 2


class Moment(NamedTuple):
    """The start of a backward pass, or of its first half."""

    held: tuple[int, ...]  # micro-batches of every stage here whose activations are kept, this one included
    deferred: tuple[int, ...]  # and of which only weight gradients are still to be computed
    begun: tuple[Begun, ...]  # of every stage
    stage: int = 0  # whose backward pass it is, of the rank's stages
    split: bool = False  # whether this one leaves its weight gradients for later
    waiting: int = 0  # messages that are being received, or have been, for computations after it
    since_loss: int = 0  # of the last stage: how many of these were asked for after the loss
    sent: int = 0  # gradients that were sent before
    just_sent: bool = False  # whether one of them was the last message
    passed: int = 0  # gradients that one stage has left for another one here

    @property
    def before(self) -> Begun:
        """What earlier passes have left of this stage's gradients."""
        return self.begun[self.stage]


@lru_cache(maxsize=8192)
def moments(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    """Those that no other one exceeds in everything."""
    if pp == 1:
        return (Moment(held=(1,), deferred=(0,), begun=(Begun.ALL if micro_batches > 1 else Begun.NOTHING,)),)
    # Beyond it a pipeline is as full as it gets, but for gpipe's; whole rounds, as some schedules want them.
    enough = micro_batches if micro_batches < 4 * pp or schedule == "gpipe" else 3 * pp + micro_batches % pp
    played = _played(schedule, pp, chunks, enough, rank)
    senders = sum(1 for stage in stages_of_rank(pp, chunks, schedule, rank) if stage) - bottom(
        schedule, pp, rank
    )
    missing = (micro_batches - enough) * senders
    return tuple(one._replace(sent=one.sent + missing) if any(one.begun) else one for one in played)


def bottom(schedule: str, pp: int, rank: int) -> bool:
    """Whether both sides of a V's lower end are on this rank: one stage passes to the next without a message."""
    return schedule in V_SHAPED and rank == pp - 1


@lru_cache(maxsize=1024)
def _played(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    split = schedule in SPLIT_BACKWARD
    stages = stages_of_rank(pp, chunks, schedule, rank)
    place = {stage: number for number, stage in enumerate(stages)}
    held, deferred = [0] * len(stages), [0] * len(stages)
    left = [Begun.NOTHING] * len(stages)
    waiting = sent = passed = 0
    just_sent = False
    at_loss = 0  # messages that were there when a loss was last computed
    # And how many gradients had been sent, when it was so for the last time.
    seen: dict[Moment, int] = {}
    for instruction in rank_program(schedule, pp, chunks, micro_batches, rank):
        action, here = instruction.action, place[instruction.stage]
        if action in RECEIVES:
            waiting += 1
        elif action in SENDS:
            just_sent = action is Action.SEND_BACKWARD
            sent += just_sent
        elif action is Action.FORWARD:
            held[here] += 1
            waiting -= instruction.stage > 0 and instruction.stage - 1 not in place
            if instruction.stage == pp * chunks - 1:
                at_loss = waiting
        elif action is Action.WEIGHT:
            deferred[here] -= 1
            left[here] = Begun.ALL
        else:
            waiting -= instruction.stage < pp * chunks - 1 and instruction.stage + 1 not in place
            passed -= instruction.stage + 1 in place
            half = split and action is Action.INPUT
            moment = Moment(
                held=tuple(held),
                deferred=tuple(deferred),
                begun=tuple(left),
                stage=here,
                split=half,
                waiting=waiting,
                since_loss=waiting - at_loss if instruction.stage == pp * chunks - 1 else 0,
                just_sent=just_sent,
                passed=passed,
            )
            seen.pop(moment, None)  # so that they are in the order of their last time
            seen[moment] = sent
            passed += instruction.stage - 1 in place
            left[here] = max(left[here], Begun.ENDS if half else Begun.ALL)
            held[here] -= 1
            deferred[here] += half
    outermost = _outermost(seen)
    # In the order of time: of two that are as full, the first one is the peak.
    return tuple(one._replace(sent=sent) for one, sent in seen.items() if one in outermost)


def _outermost(seen: Iterable[Moment]) -> set[Moment]:
    def exceeds(one: Moment, other: Moment) -> bool:
        return (
            one.split >= other.split
            and one.waiting >= other.waiting
            and one.since_loss <= other.since_loss
            and one.just_sent >= other.just_sent
            and one.passed >= other.passed
            and all(map(ge, one.held, other.held))
            and all(map(ge, one.deferred, other.deferred))
            and all(map(ge, one.begun, other.begun))
        )

    # The fullest first: they are what excludes the others.
    kept: dict[int, list[Moment]] = {}
    for moment in sorted(
        seen, key=lambda one: -sum(one.held) - sum(one.deferred) - sum(one.begun) - one.split
    ):
        alike = kept.setdefault(moment.stage, [])
        if not any(exceeds(other, moment) for other in alike):
            alike.append(moment)
    return {moment for alike in kept.values() for moment in alike}
