"""Run a pipeline schedule: this rank's instructions, one after the other.

Without a pipeline the list is: forward and backward of the first micro-batch, then of the second, and so on. What a
stage computes is up to the subclass: part of a network built by Shoal (``execute``), or of any module
(``module_pipeline``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from shoal.facts.layout.stages import Stage, rank_of_stage
from shoal.facts.schedules.programs import Action, Instruction, programs
from shoal.parallel.deferred import Deferred
from shoal.parallel.mesh import Mesh
from shoal.parallel.pipeline import Arrival, Channels
from shoal.parallel.shards import Reducer

Key = tuple[int, int]  # (stage, micro-batch)


class Segment(Protocol):
    """A rank's part of one stage."""

    stage: Stage

    def __call__(self, inputs: Tensor, batch: Any, place: int | None = None) -> Tensor:
        """Takes the previous stage's hidden states; returns hidden states or, at the last stage, sums of the loss."""


@dataclass
class StepState:
    """State carried between the instructions of a step."""

    batches: Sequence[Any]
    arriving: dict[Key, Arrival | Tensor] = field(default_factory=dict)  # hidden states
    arriving_back: dict[Key, Arrival | Tensor] = field(default_factory=dict)  # their gradients
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


class ScheduleExecutor:
    """Runs the segments of one rank."""

    def __init__(
        self,
        segments: Sequence[Segment],
        mesh: Mesh,
        gradients: Reducer,
        deferred: Deferred | None = None,
        compiled: bool = False,
    ) -> None:
        """``deferred`` keeps the weight gradients of the schedule's separate passes; None: no pass is split.

        ``compiled``: whether blocks compile when they first run.
        """
        self.segments = {segment.stage.index: segment for segment in segments}
        self.mesh, self.layout = mesh, mesh.layout
        self.gradients = gradients
        self.stages = self.layout.pp * self.layout.chunks
        self.channels = Channels(mesh) if self.layout.pp > 1 else None
        # Kinds of batches already computed, where that matters.
        self.loaded: set[Hashable] | None = None
        if self.channels is not None and (compiled or mesh.device.type == "cuda"):
            self.loaded = set()
        self.deferred = deferred

    # What subclasses define, because it depends on what a stage computes.

    def kind(self, batch: Any) -> Hashable:
        """Batches of the same kind run the same kernels."""
        raise NotImplementedError

    def entry(self, batch: Any) -> Tensor:
        """The first stage's input."""
        raise NotImplementedError

    def boundary(self, stage: int, batch: Any) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the hidden states entering a stage, and of their gradients."""
        raise NotImplementedError

    # Passes.

    def both_passes(self, batches: Sequence[Any]) -> list[Tensor]:
        """Forward and backward; returns the loss's sums of each micro-batch whose last stage is here."""
        program = self._program(len(batches))
        complete = _last_backward(program)
        underway = StepState(batches)
        for number, instruction in enumerate(program):
            # Traces show the current instruction; outside a trace this costs microseconds.
            with record_function(f"shoal {instruction}"):
                stage, micro = instruction.stage, instruction.micro
                last = complete.get(stage) == number
                match instruction.action:
                    case Action.FORWARD:
                        self._forward(stage, micro, underway)
                    case Action.BACKWARD:
                        self.gradients.before_backward(stage, last)
                        self._backward(stage, micro, underway)
                        self.gradients.after_backward(stage, last)
                    case Action.INPUT:
                        self.gradients.before_backward(stage, False)
                        with self._deferring(stage, micro):
                            self._backward(stage, micro, underway)
                    case Action.WEIGHT:
                        if self.deferred is not None:
                            self.deferred.compute(stage, micro)
                        self.gradients.after_backward(stage, last)
                    case _:
                        self._communicate(instruction, underway)
        if self.channels is not None:
            self.channels.wait_for_sends()
        return underway.losses

    @torch.no_grad()
    def forward_passes(self, batches: Sequence[Any], place: int | None = None) -> list[Tensor]:
        """Forward only; returns the network's output for each micro-batch whose last stage is here."""
        underway = StepState(batches)
        for instruction in self._program(len(batches)):
            if instruction.action is Action.FORWARD:
                self._forward(instruction.stage, instruction.micro, underway, place)
                underway.inputs.clear()
                if instruction.stage == self.stages - 1 or instruction.stage + 1 in self.segments:
                    del underway.outputs[instruction.stage, instruction.micro]
            elif instruction.action in (Action.SEND_FORWARD, Action.RECEIVE_FORWARD):
                self._communicate(instruction, underway)
            if instruction.action is Action.SEND_FORWARD:
                del underway.outputs[instruction.stage, instruction.micro]
        if self.channels is not None:
            self.channels.wait_for_sends()
        return underway.losses

    def load_kernels(self, batch: Any, place: int | None = None) -> None:
        """Compute every stage once before the first message, unless a batch of this shape was computed before.

        CUDA loads a kernel at its first launch and waits for an idle device to do so. The device may never be idle: a
        receive posted ahead may be waiting there for a rank that waits for us. Also, stages compile their blocks in
        parallel here; within a step each would start compiling only when the one before is done. The results are
        discarded: all ranks of a stage take part in its sums, and the step then starts afresh.
        """
        kind = (self.kind(batch), torch.is_grad_enabled(), place is None)
        if self.loaded is None or kind in self.loaded:
            return
        self.loaded.add(kind)
        for stage, segment in self.segments.items():
            # Twice: the second time gradients are added to those of the first.
            for _ in range(2 if torch.is_grad_enabled() else 1):
                inputs = self.entry(batch)
                if not segment.stage.first:
                    shape, dtype = self.boundary(stage, batch)
                    inputs = torch.zeros(shape, dtype=dtype, device=self.mesh.device)
                    inputs.requires_grad_(torch.is_grad_enabled())
                output = segment(inputs, batch, place)
                if torch.is_grad_enabled():
                    self.gradients.before_backward(stage, False)
                    with self._deferring(stage, 0):
                        torch.autograd.backward(output, torch.zeros_like(output))
                    if self.deferred is not None:
                        self.deferred.compute(stage, 0)
            if torch.is_grad_enabled():
                self.gradients.after_backward(stage, True)
        if torch.is_grad_enabled():
            self.gradients.finish_step()
            self.gradients.start_step()
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    @contextmanager
    def _deferring(self, stage: int, micro: int) -> Iterator[None]:
        """Defer the weight gradients of the enclosed backward pass, if the schedule splits them off."""
        if self.deferred is None:
            yield
            return
        self.deferred.begin(stage, micro)
        yield
        self.deferred.end()

    def _rank_of(self, stage: int) -> int:
        return rank_of_stage(self.layout.pp, self.layout.chunks, self.layout.schedule, stage)

    def _program(self, micro_batches: int) -> list[Instruction]:
        layout = self.layout
        return programs(layout.schedule, layout.pp, layout.chunks, micro_batches)[self.mesh.coords["pp"]]

    def _forward(self, stage: int, micro: int, underway: StepState, place: int | None = None) -> None:
        segment, batch = self.segments[stage], underway.batches[micro]
        inputs = self.entry(batch)
        if not segment.stage.first:
            inputs = _arrived(underway.arriving.pop((stage, micro)))
            inputs.requires_grad_(torch.is_grad_enabled())
            underway.inputs[stage, micro] = inputs
        output = segment(inputs, batch, place)
        underway.outputs[stage, micro] = output
        if segment.stage.last:
            underway.losses.append(output.detach())
        elif stage + 1 in self.segments:  # the turn of a V-shaped schedule: the next stage is here as well
            underway.arriving[stage + 1, micro] = output.detach()

    def _backward(self, stage: int, micro: int, underway: StepState) -> None:
        segment = self.segments[stage]
        output = underway.outputs.pop((stage, micro))
        if segment.stage.last:
            output[0].backward()
        else:
            gradient = _arrived(underway.arriving_back.pop((stage, micro)))
            if self.channels is not None and stage + 1 not in self.segments:
                # The gradient has come back, so its rank has received what was sent.
                next_rank = self._rank_of(stage + 1)
                self.channels.has_arrived(Instruction(Action.SEND_FORWARD, stage, micro, next_rank))
            torch.autograd.backward(output, gradient)
        if not segment.stage.first and stage - 1 in self.segments:
            underway.arriving_back[stage - 1, micro] = _gradient(underway.inputs.pop((stage, micro)))

    def _communicate(self, instruction: Instruction, underway: StepState) -> None:
        assert self.channels is not None and instruction.peer is not None
        stage, micro, peer = instruction.stage, instruction.micro, instruction.peer
        match instruction.action:
            case Action.SEND_FORWARD:
                self.channels.send(underway.outputs[stage, micro].detach(), instruction)
            case Action.SEND_BACKWARD:
                self.channels.send(_gradient(underway.inputs.pop((stage, micro))), instruction)
            case Action.RECEIVE_FORWARD:
                shape, dtype = self.boundary(stage, underway.batches[micro])
                underway.arriving[stage, micro] = self.channels.receive(shape, dtype, peer)
            case Action.RECEIVE_BACKWARD:
                # The receive may be posted before the forward pass that this gradient belongs to.
                shape, dtype = self.boundary(stage + 1, underway.batches[micro])
                underway.arriving_back[stage, micro] = self.channels.receive(shape, dtype, peer)


def _last_backward(program: list[Instruction]) -> dict[int, int]:
    """For every stage, the index of the instruction that completes its gradients."""
    return {
        instruction.stage: number
        for number, instruction in enumerate(program)
        if instruction.action in (Action.BACKWARD, Action.WEIGHT)
    }


def _arrived(tensor: Arrival | Tensor) -> Tensor:
    return tensor.wait() if isinstance(tensor, Arrival) else tensor


def _gradient(inputs: Tensor) -> Tensor:
    assert inputs.grad is not None
    return inputs.grad
