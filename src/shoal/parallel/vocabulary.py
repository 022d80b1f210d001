"""Vocabulary parallelism: each tensor rank holds some rows of the embedding and of the head.

The full logits never exist on a rank. What the loss needs of the others is, for each token, the largest logit, the sum
of the exponentials and the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.facts.logits import tokens_at_once
from shoal.facts.model.tensor_split import Box
from shoal.facts.targets import IGNORE
from shoal.models.linear import Embedding
from shoal.models.loss import Head
from shoal.parallel.tensor_region import TensorRegion, all_gather


class VocabularyEmbedding(Embedding):
    """Looks up the tokens whose rows are here, and zero for the rest; the sum over ranks is the embedding."""

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
            # Nothing to look up; the empty sum is zero and still gives the weight its (empty) gradient.
            found = self.weight.sum(0).to(self.compute).expand(*index.shape, -1)
        return self.stream.leave(found)


class VocabularyHead(Head):
    """Logits of the rows that are here, and a loss that is the same on every rank of the group."""

    def __init__(self, local: Head, tied: Embedding | None, box: Box, stream: TensorRegion) -> None:
        with torch.device("meta"):
            super().__init__(box.shape[1], box.shape[0], tied)
        if tied is None:
            self.weight = local.weight
        self.first = box.offset[0]
        self.vocabulary = box.whole[0]
        self.most_rows = -(-self.vocabulary // stream.ranks)
        self.stream = stream

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows, wanted = self.stream.enter(hidden).flatten(0, -2), targets.flatten()
        count = (wanted != IGNORE).sum()
        # By the largest part and not by this rank's: ranks meet in every chunk, so all must have equally many.
        at_once = tokens_at_once(self.most_rows)
        if rows.shape[0] <= at_once:
            return self.summed_here(rows, wanted, []), count
        pieces = [
            checkpoint(self.summed_here, *piece, [], use_reentrant=False, preserve_rng_state=False)
            for piece in zip(torch.split(rows, at_once), torch.split(wanted, at_once), strict=True)
        ]
        return torch.stack(pieces).sum(), count

    def summed_here(self, rows: Tensor, wanted: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The loss of some tokens. ``known`` keeps what ranks told each other, for when it is computed again."""
        logits = self.logits(rows)
        if not known:
            known.append(self.over_the_vocabulary(logits, wanted))
        loss: Tensor = CrossEntropy.apply(logits, wanted, self.first, *known[0])
        return loss

    @torch.no_grad()
    def over_the_vocabulary(self, logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """For each token ln Σ exp(logit) over all ranks' rows, and the logit of its target."""
        tokens, rows = logits.shape
        largest = logits.amax(-1) if rows else logits.new_full((tokens,), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.stream.group)
        place, here = rows_here(wanted, self.first, rows)
        both = logits.new_zeros(2, tokens)
        both[0] = (logits - largest[:, None]).exp().sum(-1)
        if rows:
            both[1] = torch.where(here, logits.gather(1, place[:, None])[:, 0], 0)
        dist.all_reduce(both, group=self.stream.group)
        return both[0].log() + largest, both[1]

    @torch.no_grad()
    def scores(self, hidden: Tensor, place: int) -> Tensor:
        """As the whole head's: all of the vocabulary, on every rank."""
        here = self.logits(self.stream.enter(hidden)[:, place])
        # Ranks exchange equal sizes. Only the last ones can have fewer rows, so what is padded ends up at the end.
        padded = F.pad(here, (0, self.most_rows - here.shape[1]))
        return all_gather(padded[..., None], self.stream.group, self.stream.ranks)[:, : self.vocabulary, 0]


class CrossEntropy(torch.autograd.Function):
    """Σ (ln Σ exp(logits) − target's logit) over the targets that count, from the logits of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, wanted: Tensor, first: int, normaliser: Tensor, target: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, wanted, normaliser)
        ctx.first = first
        return torch.where(wanted != IGNORE, normaliser - target, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Softmax minus one-hot, in the rows that are here."""
        logits, wanted, normaliser = ctx.saved_tensors
        rows = logits.shape[1]
        # In place: of logits-sized tensors there are the saved one and this, no third.
        result = (logits - normaliser[:, None]).exp_()
        if rows:
            place, here = rows_here(wanted, ctx.first, rows)
            result.scatter_add_(1, place[:, None], -here[:, None].to(result.dtype))
        result.mul_(torch.where(wanted != IGNORE, gradient, 0)[:, None])
        return result, None, None, None, None


def rows_here(index: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which row of ours a token is, any where it is none, and whether it is one. IGNORE is in no rank's rows."""
    place = index - first
    here = (place >= 0) & (place < rows)
    return place.clamp(0, max(0, rows - 1)), here
