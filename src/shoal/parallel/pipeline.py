"""Pipeline parallelism (``pp``): the stages that a rank holds, and the channels between them.

The schedule (``facts.schedule``) decides who computes what when, and ``execute`` follows it. Why not torch's own
pipelining runtime: it cannot print or check a schedule ahead of a run, refuses fewer micro-batches than stages, and
finds weight gradients by walking the autograd graph. A list of instructions and a few groups are less code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.facts.layout import Layout
from shoal.facts.layout.stages import Stage, cut, rank_of_stage, stages_of_rank
from shoal.facts.model import Model
from shoal.facts.schedules.programs import Instruction
from shoal.parallel.mesh import Mesh


def my_stages(model: Model, layout: Layout, place: int, seq: int) -> list[Stage]:
    """The stages on one rank of the pipeline."""
    stages = cut(model, layout.pp * layout.chunks, seq)
    return [stages[number] for number in stages_of_rank(layout.pp, layout.chunks, layout.schedule, place)]


@dataclass
class Arrival:
    """A tensor being received."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


class Channels:
    """Point-to-point messages between the ranks of one pipeline.

    There is one group per direction, and no rank has two neighbours in it. NCCL runs the messages of a group in order:
    with both directions in one queue, two ranks that each send first would deadlock; with both neighbours in one queue,
    a send to the next would wait behind a receive from the previous one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.place = mesh.coords["pp"]
        self.device, self.transport = mesh.device, mesh.transport
        self.kinds = _apart(_neighbours(mesh.layout))
        self.groups = [
            {"down": mesh.line_of("pp"), "up": mesh.line_of("pp")}
            for _ in range(max(self.kinds.values()) + 1)
        ]
        self._flying: dict[Instruction, tuple[Tensor, dist.Work]] = {}
        if self.device.type == "cuda":
            self._connect()

    def _connect(self) -> None:
        """Make NCCL set up every connection now, one after the other, with one message along each.

        NCCL would otherwise connect at the first message, and connecting waits for the device. The device may itself be
        waiting, in a receive posted ahead, for a rank that is stuck connecting to us.
        """
        token = torch.zeros(1, device=self.device)
        for low, high in self.kinds:
            for sender, receiver in ((low, high), (high, low)):
                if self.place == sender:
                    self._start(dist.isend, token, sender, receiver).wait()
                elif self.place == receiver:
                    self._start(dist.irecv, token, sender, receiver).wait()
            torch.cuda.synchronize(self.device)

    def _start(self, what: Callable[..., Any], tensor: Tensor, sender: int, receiver: int) -> dist.Work:
        """Issue one message as a batch of one. Outside a batch, torch gives every pair of ranks its own communicator
        and warns.
        """
        group = self._group(sender, receiver)
        peer = receiver if self.place == sender else sender
        (work,) = dist.batch_isend_irecv([dist.P2POp(what, tensor, group=group, group_peer=peer)])
        return work

    def send(self, tensor: Tensor, message: Instruction) -> None:
        """Start sending; keep the tensor alive until it has arrived."""
        assert message.peer is not None
        if self.transport != "gloo":  # Gloo's messages cannot be polled
            self._flying = {
                key: (kept, work) for key, (kept, work) in self._flying.items() if not work.is_completed()
            }
        tensor = tensor.contiguous()
        self._flying[message] = (tensor, self._start(dist.isend, tensor, self.place, message.peer))

    def has_arrived(self, message: Instruction) -> None:
        """Free a sent tensor: an answer to its message has arrived."""
        if message in self._flying:
            _, work = self._flying.pop(message)
            work.wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Arrival:
        """Start receiving. Messages from a peer arrive in the order it sends them."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return Arrival(tensor, self._start(dist.irecv, tensor, peer, self.place))

    def wait_for_sends(self) -> None:
        for _, work in self._flying.values():
            work.wait()
        self._flying.clear()

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup:
        kind = self.kinds[min(sender, receiver), max(sender, receiver)]
        return self.groups[kind]["down" if sender < receiver else "up"]


def _neighbours(layout: Layout) -> list[tuple[int, int]]:
    """Pairs of ranks that hold adjacent stages; in some schedules also the first and the last rank."""
    stages = range(layout.pp * layout.chunks)
    ranks = [rank_of_stage(layout.pp, layout.chunks, layout.schedule, stage) for stage in stages]
    return sorted({(min(pair), max(pair)) for pair in pairwise(ranks) if pair[0] != pair[1]})


def _apart(pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Number the pairs so that no two pairs of one rank share a number; at most three numbers are needed."""
    kinds: dict[tuple[int, int], int] = {}
    for pair in pairs:
        taken = {kind for other, kind in kinds.items() if {*other} & {*pair}}
        kinds[pair] = min(set(range(len(taken) + 1)) - taken)
    return kinds
