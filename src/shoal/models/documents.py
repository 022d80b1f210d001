"""Documents: where the documents of packed rows begin and end, worked out once per micro-batch on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.models.device_copy import to_device


@dataclass(frozen=True)
class Documents:
    """The documents of [B, T] tokens, which attention does not cross. None ends later than its row.

    All tensors have the same shape for every micro-batch of that size, and no number in them is a Python one: a
    compiled block, which is handed them, is never compiled again for other documents.
    """

    # int32 [B·T + 1], where the tokens are: the cumulative lengths of all rows' documents (``cu_seqlens``), one row
    # after the other, then B·T over and over.
    ends: Tensor
    # int64 [2], always on the host, so that reading it waits for no device: how many there are, and the longest.
    sizes: Tensor
    # The cumulative lengths once more, always on the host: for who computes documents piece by piece.
    host_ends: Tensor

    @staticmethod
    def of(ids: Tensor) -> Documents:
        """From each token's document, [B, T] on the host. A document is a run of equal numbers in a row."""
        rows, length = ids.shape
        begins = torch.ones(rows, length, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        tokens = rows * length
        ends = torch.full((tokens + 1,), tokens, dtype=torch.int32)
        ends[: len(starts)] = starts
        longest = int(torch.diff(starts, append=torch.tensor([tokens])).max()) if tokens else 0
        return Documents(ends, torch.tensor([len(starts), longest]), ends)

    def to(self, device: torch.device) -> Documents:
        return replace(self, ends=to_device(self.ends, device))


def listed_ends(ends: Tensor, sizes: Tensor) -> list[int]:
    """Cumulative lengths of the documents alone, as numbers; waits for the device of ``ends``."""
    found: list[int] = ends[: int(sizes[0]) + 1].tolist()
    return found
