"""Pass a tensor to the next rank of a ring and receive the previous rank's, overlapped with computation.

Inside a compiled block it is one of torch's functional collectives, an operator that the compiler sees and keeps in
order, started here and waited for at its use. Torch has no functional point-to-point message; an all-to-all in which
each rank sends only to the next one moves the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Passing:
    """A tensor being received; what was sent stays alive until both have arrived."""

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
    """Start the exchange; the tensor must not change until it has been waited for."""
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
