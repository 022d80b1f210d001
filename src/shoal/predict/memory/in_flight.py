"""Micro-batches in flight on a pipeline rank, per stage, at the start of each backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from shoal.facts.layout import V_SHAPED
from shoal.facts.layout.stages import stages_of_rank
from shoal.facts.schedules.programs import RECEIVES, SENDS, SPLIT_BACKWARD, Action, rank_program


class GradientProgress(IntEnum):
    """Which gradients of a stage earlier backward passes have produced."""

    NOTHING = 0
    ENDS = 1  # only those of embedding and head; the blocks' weight gradients were deferred
    ALL = 2


class Moment(NamedTuple):
    """The start of a backward pass, or of its first half."""

    held: tuple[int, ...]  # per stage here: micro-batches whose activations are saved, including this one
    deferred: tuple[int, ...]  # per stage here: micro-batches with only weight gradients left to compute
    begun: tuple[GradientProgress, ...]  # per stage here
    stage: int = 0  # index of the stage whose backward pass begins
    split: bool = False  # whether this pass defers its weight gradients
    waiting: int = 0  # messages being received, or received already, for later computations
    since_loss: int = 0  # on the last stage: how many of these receives started after the loss
    sent: int = 0  # gradients sent so far
    just_sent: bool = False  # whether the last message sent was a gradient
    passed: int = 0  # gradients passed from one stage to another on this same rank

    @property
    def before(self) -> GradientProgress:
        """What earlier passes have produced of this stage's gradients."""
        return self.begun[self.stage]


@lru_cache(maxsize=8192)
def moments(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    """The moments that no other moment dominates in every field."""
    if pp == 1:
        return (
            Moment(
                held=(1,),
                deferred=(0,),
                begun=(GradientProgress.ALL if micro_batches > 1 else GradientProgress.NOTHING,),
            ),
        )
    # With more micro-batches the pipeline holds no more, except under gpipe; whole rounds, as some schedules need.
    enough = micro_batches if micro_batches < 4 * pp or schedule == "gpipe" else 3 * pp + micro_batches % pp
    played = _played(schedule, pp, chunks, enough, rank)
    senders = sum(1 for stage in stages_of_rank(pp, chunks, schedule, rank) if stage) - bottom(
        schedule, pp, rank
    )
    missing = (micro_batches - enough) * senders
    return tuple(one._replace(sent=one.sent + missing) if any(one.begun) else one for one in played)


def bottom(schedule: str, pp: int, rank: int) -> bool:
    """Whether this rank is the bottom of a V, where one stage passes to the next without a message."""
    return schedule in V_SHAPED and rank == pp - 1


@lru_cache(maxsize=1024)
def _played(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    split = schedule in SPLIT_BACKWARD
    stages = stages_of_rank(pp, chunks, schedule, rank)
    place = {stage: number for number, stage in enumerate(stages)}
    held, deferred = [0] * len(stages), [0] * len(stages)
    left = [GradientProgress.NOTHING] * len(stages)
    waiting = sent = passed = 0
    just_sent = False
    at_loss = 0  # messages received when a loss was last computed
    # Each moment with the gradients sent by its last occurrence.
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
            left[here] = GradientProgress.ALL
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
            seen.pop(moment, None)  # keep them ordered by last occurrence
            seen[moment] = sent
            passed += instruction.stage - 1 in place
            left[here] = max(left[here], GradientProgress.ENDS if half else GradientProgress.ALL)
            held[here] -= 1
            deferred[here] += half
    outermost = _outermost(seen)
    # In time order: on a tie, the first moment is the peak.
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

    # Largest first, since those dominate the others.
    kept: dict[int, list[Moment]] = {}
    for moment in sorted(
        seen, key=lambda one: -sum(one.held) - sum(one.deferred) - sum(one.begun) - one.split
    ):
        alike = kept.setdefault(moment.stage, [])
        if not any(exceeds(other, moment) for other in alike):
            alike.append(moment)
    return {moment for alike in kept.values() for moment in alike}
