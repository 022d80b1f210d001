"""Instructions of a pipeline rank, and the tensors they compute, need, send or receive."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple


class ScheduleError(ValueError):
    """Raised for programs that cannot be executed; the message names rank, instruction and reason."""


class Action(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass of a stage
    INPUT = "I"  # its first half: the input gradient, which the previous stage waits for
    WEIGHT = "W"  # its second half: the weight gradients, which no other rank waits for
    SEND_FORWARD = "SF"  # activations
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"  # gradients of activations
    RECEIVE_BACKWARD = "RB"

    __hash__ = str.__hash__  # an enum's own hash is slow, and programs have thousands of these


SENDS = frozenset({Action.SEND_FORWARD, Action.SEND_BACKWARD})
RECEIVES = frozenset({Action.RECEIVE_FORWARD, Action.RECEIVE_BACKWARD})
COMPUTATIONS = frozenset(Action) - SENDS - RECEIVES


class Instruction(NamedTuple):
    """What to do, for which stage of this rank and which micro-batch. ``peer`` is the rank at the other end."""

    action: Action
    stage: int
    micro: int
    peer: int | None = None

    @property
    def computes(self) -> bool:
        return self.action in COMPUTATIONS

    def __str__(self) -> str:
        """``F0.3`` is the forward of stage 0 and micro-batch 3; ``SF0.3>1`` sends it to rank 1."""
        other = "" if self.peer is None else f"{'>' if self.action in SENDS else '<'}{self.peer}"
        return f"{self.action.value}{self.stage}.{self.micro}{other}"


Program = list[Instruction]
Kind = Literal["activation", "gradient"]


class StageTensor(NamedTuple):
    """A tensor passed between two stages, named after the stage that computes it."""

    kind: Kind
    stage: int
    micro: int


# What each computation produces for another stage, and needs from one.
_OF_COMPUTATION: dict[Action, Kind] = {
    Action.FORWARD: "activation",
    Action.BACKWARD: "gradient",
    Action.INPUT: "gradient",
}
# What each message carries, and the offset from the message's stage to the stage that computes the tensor.
_OF_MESSAGE: dict[Action, tuple[Kind, int]] = {
    Action.SEND_FORWARD: ("activation", 0),
    Action.SEND_BACKWARD: ("gradient", 0),
    Action.RECEIVE_FORWARD: ("activation", -1),
    Action.RECEIVE_BACKWARD: ("gradient", 1),
}


def tensor_made(instruction: Instruction) -> StageTensor | None:
    """The tensor that a computation produces for another stage."""
    kind = _OF_COMPUTATION.get(instruction.action)
    return StageTensor(kind, instruction.stage, instruction.micro) if kind else None


def tensor_needed(instruction: Instruction, stages: int) -> StageTensor | None:
    """The tensor that a computation needs from another stage; None for the first stage's tokens and the last one's
    loss.
    """
    kind = _OF_COMPUTATION.get(instruction.action)
    stage = instruction.stage + (-1 if kind == "activation" else 1)
    return StageTensor(kind, stage, instruction.micro) if kind and 0 <= stage < stages else None


def tensor_carried(instruction: Instruction) -> StageTensor:
    """The tensor that a send or receive carries. A receive is named after the stage that will use the tensor."""
    kind, away = _OF_MESSAGE[instruction.action]
    return StageTensor(kind, instruction.stage + away, instruction.micro)


def consumer(tensor: StageTensor) -> int:
    """The stage that uses a tensor."""
    return tensor.stage + 1 if tensor.kind == "activation" else tensor.stage - 1


def send(tensor: StageTensor, peer: int) -> Instruction:
    action = Action.SEND_FORWARD if tensor.kind == "activation" else Action.SEND_BACKWARD
    return Instruction(action, tensor.stage, tensor.micro, peer)


def receive(tensor: StageTensor, peer: int) -> Instruction:
    action = Action.RECEIVE_FORWARD if tensor.kind == "activation" else Action.RECEIVE_BACKWARD
    return Instruction(action, consumer(tensor), tensor.micro, peer)
