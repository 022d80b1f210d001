"""Pipeline parallelism (``pp``): the stages that a rank holds, and the channels between them.

Who computes what when is the schedule's business (``facts.schedule``), and ``execute`` follows it. torch's own
pipelining runtime does not print or check its schedules ahead of a run, refuses fewer micro-batches than stages,
and finds weight gradients by walking the autograd graph; a list of instructions and a few groups are less.
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
    """A tensor on its way here."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


class Channels:
    """Point-to-point messages between the ranks of one pipeline.

    There is a group for each direction, and in it no rank has two neighbours. NCCL carries out the messages of a group
    one after the other: with both directions in one queue, two ranks that each send first would wait for each other
    forever, and with both neighbours in one, a send to the next would wait behind a receive from the one before.
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

        It would do so at the first message, and set-up waits for the device: which may itself be waiting, in a receive
        that was posted ahead, for a rank that is waiting in the same set-up for us.
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
        """A batch of one. Outside of a batch torch gives every pair of ranks a communicator of its own, and warns."""
        group = self._group(sender, receiver)
        peer = receiver if self.place == sender else sender
        (work,) = dist.batch_isend_irecv([dist.P2POp(what, tensor, group=group, group_peer=peer)])
        return work

    def send(self, tensor: Tensor, message: Instruction) -> None:
        """Start sending; the tensor is kept until it has arrived."""
        assert message.peer is not None
        if self.transport != "gloo":  # whose messages cannot be asked
            self._flying = {
                key: (kept, work) for key, (kept, work) in self._flying.items() if not work.is_completed()
            }
        tensor = tensor.contiguous()
        self._flying[message] = (tensor, self._start(dist.isend, tensor, self.place, message.peer))

    def has_arrived(self, message: Instruction) -> None:
        """An answer to a message is here, so it need not be kept any longer."""
        if message in self._flying:
            _, work = self._flying.pop(message)
            work.wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Arrival:
        """Start receiving. Messages from a peer arrive in the order in which it sends them."""
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
    """Pairs of ranks that hold stages next to each other; in some schedules also the first rank and the last."""
    stages = range(layout.pp * layout.chunks)
    ranks = [rank_of_stage(layout.pp, layout.chunks, layout.schedule, stage) for stage in stages]
    return sorted({(min(pair), max(pair)) for pair in pairwise(ranks) if pair[0] != pair[1]})


def _apart(pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Every pair with a number that no other pair of either of its ranks has; at most three are needed."""
    kinds: dict[tuple[int, int], int] = {}
    for pair in pairs:
        taken = {kind for other, kind in kinds.items() if {*other} & {*pair}}
        kinds[pair] = min(set(range(len(taken) + 1)) - taken)
    return kinds
