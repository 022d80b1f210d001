"""One instruction of a pipeline rank, and the tensor it computes, needs, sends or receives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple


class ScheduleError(ValueError):
    """Programs that no set of ranks could carry out; the message names rank, instruction and reason."""


class Action(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass of a stage
    INPUT = "I"  # its first half: the gradient of the input, which the stage before is waiting for
    WEIGHT = "W"  # its second half: the gradients of the weights, which nobody waits for
    SEND_FORWARD = "SF"  # activations
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"  # gradients of activations
    RECEIVE_BACKWARD = "RB"


SENDS = frozenset({Action.SEND_FORWARD, Action.SEND_BACKWARD})
RECEIVES = frozenset({Action.RECEIVE_FORWARD, Action.RECEIVE_BACKWARD})
COMPUTATIONS = frozenset(Action) - SENDS - RECEIVES


@dataclass(frozen=True, slots=True)
class Instruction:
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


class Tensor(NamedTuple):
    """What passes between two stages, named after the stage that makes it."""

    kind: Literal["activation", "gradient"]
    stage: int
    micro: int


def tensor_made(instruction: Instruction) -> Tensor | None:
    """What a computation makes for another stage."""
    if instruction.action is Action.FORWARD:
        return Tensor("activation", instruction.stage, instruction.micro)
    if instruction.action in (Action.BACKWARD, Action.INPUT):
        return Tensor("gradient", instruction.stage, instruction.micro)
    return None


def tensor_needed(instruction: Instruction, stages: int) -> Tensor | None:
    """What a computation takes from another stage; the first stage reads tokens, the last one has the loss."""
    if instruction.action is Action.FORWARD and instruction.stage > 0:
        return Tensor("activation", instruction.stage - 1, instruction.micro)
    if instruction.action in (Action.BACKWARD, Action.INPUT) and instruction.stage < stages - 1:
        return Tensor("gradient", instruction.stage + 1, instruction.micro)
    return None


def tensor_carried(instruction: Instruction) -> Tensor:
    """What a send or a receive carries. A receive is named after the stage that will use the tensor."""
    stage, micro = instruction.stage, instruction.micro
    if instruction.action is Action.SEND_FORWARD:
        return Tensor("activation", stage, micro)
    if instruction.action is Action.SEND_BACKWARD:
        return Tensor("gradient", stage, micro)
    if instruction.action is Action.RECEIVE_FORWARD:
        return Tensor("activation", stage - 1, micro)
    if instruction.action is Action.RECEIVE_BACKWARD:
        return Tensor("gradient", stage + 1, micro)
    raise ValueError(f"{instruction} carries nothing")


def consumer(tensor: Tensor) -> int:
    """The stage that uses a tensor."""
    return tensor.stage + 1 if tensor.kind == "activation" else tensor.stage - 1


def send(tensor: Tensor, peer: int) -> Instruction:
    action = Action.SEND_FORWARD if tensor.kind == "activation" else Action.SEND_BACKWARD
    return Instruction(action, tensor.stage, tensor.micro, peer)


def receive(tensor: Tensor, peer: int) -> Instruction:
    action = Action.RECEIVE_FORWARD if tensor.kind == "activation" else Action.RECEIVE_BACKWARD
    return Instruction(action, consumer(tensor), tensor.micro, peer)
