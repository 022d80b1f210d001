"""Pipeline parallelism (``pp``): which stages a rank holds, and the channels that hidden states travel along.

Who computes what when is the schedule's business (``facts.schedule``), and ``execute`` follows it. torch's own
pipelining runtime does not print or check its schedules ahead of a run, refuses fewer micro-batches than stages,
and finds weight gradients by walking the autograd graph; a list of instructions and two groups are less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.schedule import Instruction
from shoal.facts.stages import Stage, cut, stages_of_rank
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

    There is a group for each direction. NCCL carries out the messages between two ranks one after the other; with
    both directions in one queue, two ranks that each send first would wait for each other forever.
    """

    def __init__(self, mesh: Mesh) -> None:
        line = list(range(mesh.layout.pp))
        self.place = mesh.place["pp"]
        self.device, self.transport = mesh.device, mesh.transport
        self.groups = {"down": mesh.pieces_of("pp", [line]), "up": mesh.pieces_of("pp", [line])}
        self._flying: dict[Instruction, tuple[Tensor, dist.Work]] = {}
        if self.device.type == "cuda":
            self._connect(mesh.layout.pp)

    def _connect(self, ranks: int) -> None:
        """Make NCCL set up every connection now, one after the other, with one message along each.

        It would do so at the first message, and set-up waits for the device: which may itself be waiting, in a receive
        that was posted ahead, for a rank that is waiting in the same set-up for us.
        """
        token = torch.zeros(1, device=self.device)
        neighbours = [(rank, rank + 1) for rank in range(ranks - 1)]
        # From the last rank's stage to the first rank's next one.
        around = [(0, ranks - 1)] if ranks > 2 else []
        for low, high in neighbours + around:
            for sender, receiver in ((low, high), (high, low)):
                if self.place == sender:
                    dist.send(token, group=self._group(sender, receiver), group_dst=receiver)
                elif self.place == receiver:
                    dist.recv(token, group=self._group(sender, receiver), group_src=sender)
            torch.cuda.synchronize(self.device)

    def send(self, tensor: Tensor, message: Instruction) -> None:
        """Start sending; the tensor is kept until it has arrived."""
        assert message.peer is not None
        if self.transport != "gloo":  # whose messages cannot be asked
            self._flying = {
                key: (kept, work) for key, (kept, work) in self._flying.items() if not work.is_completed()
            }
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group(self.place, message.peer), group_dst=message.peer)
        assert work is not None
        self._flying[message] = (tensor, work)

    def has_arrived(self, message: Instruction) -> None:
        """An answer to a message is here, so it need not be kept any longer."""
        if message in self._flying:
            _, work = self._flying.pop(message)
            work.wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Arrival:
        """Start receiving. Messages from a peer arrive in the order in which it sends them."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(tensor, group=self._group(peer, self.place), group_src=peer)
        assert work is not None
        return Arrival(tensor, work)

    def wait_for_sends(self) -> None:
        for _, work in self._flying.values():
            work.wait()
        self._flying.clear()

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        return self.groups["down" if sender < receiver else "up"]
