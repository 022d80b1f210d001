"""One instruction of a pipeline rank, and the tensor it computes, needs, sends or receives."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple


class ScheduleError(ValueError):
    """Programs that no set of ranks could carry out; the message names rank, instruction and reason."""


class Action(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass of a stage
    INPUT = "I"  # its first half: the gradient of the input, which the stage before is waiting for
    WEIGHT = "W"  # its second half: the gradients of the weights, which no other rank waits for
    SEND_FORWARD = "SF"  # activations
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"  # gradients of activations
    RECEIVE_BACKWARD = "RB"

    __hash__ = str.__hash__  # an enum's own is slow, and a program has thousands of them


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
    """What passes between two stages, named after the stage that makes it."""

    kind: Kind
    stage: int
    micro: int


# What a computation makes for another stage, and needs of one.
_OF_COMPUTATION: dict[Action, Kind] = {
    Action.FORWARD: "activation",
    Action.BACKWARD: "gradient",
    Action.INPUT: "gradient",
}
# What a message carries, and how far the stage that makes it is from the one that the message is named after.
_OF_MESSAGE: dict[Action, tuple[Kind, int]] = {
    Action.SEND_FORWARD: ("activation", 0),
    Action.SEND_BACKWARD: ("gradient", 0),
    Action.RECEIVE_FORWARD: ("activation", -1),
    Action.RECEIVE_BACKWARD: ("gradient", 1),
}


def tensor_made(instruction: Instruction) -> StageTensor | None:
    """What a computation makes for another stage."""
    kind = _OF_COMPUTATION.get(instruction.action)
    return StageTensor(kind, instruction.stage, instruction.micro) if kind else None


def tensor_needed(instruction: Instruction, stages: int) -> StageTensor | None:
    """What a computation takes from another stage; the first stage reads tokens, the last one has the loss."""
    kind = _OF_COMPUTATION.get(instruction.action)
    stage = instruction.stage + (-1 if kind == "activation" else 1)
    return StageTensor(kind, stage, instruction.micro) if kind and 0 <= stage < stages else None


def tensor_carried(instruction: Instruction) -> StageTensor:
    """What a send or a receive carries. A receive is named after the stage that will use the tensor."""
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
