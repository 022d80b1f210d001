"""Pass a tensor on to the next rank of a ring and receive the one of the rank before, beside what is computed.

Inside of a compiled block it is one of torch's functional collectives, an operator that the compiler sees and keeps in
order, begun here and waited for where it is used. Torch has no functional message; an all-to-all in which a rank has
something for the next one alone sends the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Passing:
    """A tensor on its way here; what was sent is kept until both have arrived."""

    arriving: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        if torch.compiler.is_compiling():
            arrived: Tensor = torch.ops._c10d_functional.wait_tensor.default(self.arriving)
            return arrived.view(self.sent.shape)
        for work in self.works:
            work.wait()
        return self.arriving


def pass_on(tensor: Tensor, group: dist.ProcessGroup, ranks: int, index: int) -> Passing:
    """Begin; the tensor must not change until it has been waited for."""
    after, before = (index + 1) % ranks, (index - 1) % ranks
    if torch.compiler.is_compiling():
        flat = tensor.reshape(-1)
        sizes, expected = ([0] * ranks for _ in range(2))
        sizes[after], expected[before] = flat.numel(), flat.numel()
        begun = torch.ops._c10d_functional.all_to_all_single.default(flat, expected, sizes, group.group_name)
        return Passing(begun, tensor, [])
    arriving = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=before),
        ]
    )
    return Passing(arriving, tensor, works)
