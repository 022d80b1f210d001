"""Vocabulary parallelism: each tensor rank holds some rows of the embedding and of the head.

The full logits never exist on a rank. The loss needs only three numbers per token from the other ranks: the largest
logit, the sum of exponentials, and the target's logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shoal.facts.model.tensor_split import Box
from shoal.models.linear import Embedding
from shoal.models.logits import rows_here
from shoal.models.loss import Head
from shoal.parallel.tensor_region import TensorRegion, all_gather


class VocabularyEmbedding(Embedding):
    """Embeds the tokens whose rows are here and returns zero for the rest; the sum over ranks is the embedding."""

    def __init__(self, local: Embedding, box: Box, stream: TensorRegion) -> None:
        with torch.device("meta"):
            super().__init__(box.shape[0], box.shape[1], local.compute)
        self.weight = local.weight
        self.first = box.offset[0]
        self.stream = stream

    def forward(self, index: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        place, here = rows_here(index, self.first, rows)
        if rows:
            found = torch.where(here[..., None], super().forward(place), 0)
        else:
            # No rows to look up: the empty sum is zero and still gives the weight its (empty) gradient.
            found = self.weight.sum(0).to(self.compute).expand(*index.shape, -1)
        return self.stream.leave(found)


class VocabularyHead(Head):
    """Logits of the local rows, and a loss that is the same on every rank of the group."""

    def __init__(self, local: Head, tied: Embedding | None, box: Box, stream: TensorRegion) -> None:
        with torch.device("meta"):
            super().__init__(box.shape[1], box.shape[0], tied, local.z_loss, local.cap)
        if tied is None:
            self.weight = local.weight
        self.first = box.offset[0]
        self.all_rows = box.whole[0]
        self.most_rows = -(-self.all_rows // stream.ranks)
        self.stream = stream

    def enter(self, hidden: Tensor) -> Tensor:
        return self.stream.enter(hidden)

    def vocabulary(self) -> SplitVocabulary:
        return SplitVocabulary(self.first, self.most_rows, self.stream.group)

    @torch.no_grad()
    def scores(self, hidden: Tensor, place: int) -> Tensor:
        """Like the whole head's: logits of the full vocabulary, on every rank."""
        here = self.logits(self.stream.enter(hidden)[:, place])
        # Ranks exchange equal sizes. Only the last ranks can have fewer rows, so padding ends up at the end.
        padded = F.pad(here, (0, self.most_rows - here.shape[1]))
        return all_gather(padded[..., None], self.stream.group, self.stream.ranks)[:, : self.all_rows, 0]


@dataclass(frozen=True)
class SplitVocabulary:
    """A vocabulary of which some rows are here; ranks exchange what a token's loss needs of all rows."""

    first: int
    most_rows: int
    group: dist.ProcessGroup

    def largest(self, values: Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def total(self, values: Tensor) -> None:
        dist.all_reduce(values, group=self.group)
