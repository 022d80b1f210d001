"""Sum gradients of parameters that several ranks hold for reasons other than data parallelism, once per step.

These are norms under sequence parallelism, key/value heads shared by neighbouring ranks, and the two copies of a tied
embedding at the two ends of a pipeline.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.facts.layout.stages import rank_of_stage
from shoal.facts.model import Model
from shoal.facts.model.parameters import EMBEDDING, by_name
from shoal.facts.model.tensor_split import SummedOver, summed_over
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard, gradient


class SharedGradients:
    """Knows which pieces have partial gradients, and over which group to sum them."""

    def __init__(
        self, model: Model, mesh: Mesh, own_head: bool, reduce_dtype: torch.dtype | None = None
    ) -> None:
        """``reduce_dtype``: the dtype gradients are sent in; None keeps their own."""
        layout, self.reduce_dtype = mesh.layout, reduce_dtype
        self.model, self.tp, self.sp = model, layout.tp, layout.sp
        self.canonical = by_name(model)
        self.tensor = mesh.group("tp")
        self.copies: dist.ProcessGroup | None = None
        count = layout.tp // model.kv_heads
        if count > 1:
            neighbours = [list(range(first, first + count)) for first in range(0, layout.tp, count)]
            self.copies = mesh.subgroup("tp", neighbours)
        self.ends: dist.ProcessGroup | None = None
        self.tied = own_head and model.tied
        last = rank_of_stage(layout.pp, layout.chunks, layout.schedule, layout.pp * layout.chunks - 1)
        if self.tied and last != 0:
            self.ends = mesh.subgroup("pp", [[0, last]])

    def sums(self, piece: Shard) -> bool:
        """Whether gradients of other ranks, or of a copy, are added to this piece's."""
        if self.tied and piece.name == EMBEDDING:
            return True
        return {"tensor": self.tensor, "copies": self.copies}.get(self._kind(piece) or "") is not None

    def sum(self, pieces: list[Shard]) -> None:
        """Complete the gradients, which are already summed over data ranks."""
        with torch.no_grad():
            over = {"tensor": self.tensor, "copies": self.copies}
            for kind, group in over.items():
                chosen = [piece for piece in pieces if self._kind(piece) == kind]
                self._sum_together([gradient(piece) for piece in chosen], group)
            if self.tied:
                self._sum_ends([gradient(piece) for piece in pieces if piece.name == EMBEDDING])

    def _kind(self, piece: Shard) -> SummedOver:
        return summed_over(self.canonical[piece.name], self.tp, self.sp)

    def _sum_ends(self, gradients: list[Tensor]) -> None:
        if len(gradients) == 2:  # both ends are here
            first, last = gradients
            first += last
            last.copy_(first)
        else:
            self._sum_together(gradients, self.ends)

    def _sum_together(self, tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
        """Sum all tensors in one message."""
        if not tensors or group is None:
            return
        together = torch.cat([tensor.reshape(-1).to(self.reduce_dtype) for tensor in tensors])
        dist.all_reduce(together, group=group)
        parts = together.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
