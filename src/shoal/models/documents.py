"""Document boundaries of packed rows, computed once per micro-batch on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.models.device_copy import to_device


@dataclass(frozen=True)
class Documents:
    """The documents of [B, T] tokens, which attention does not cross. No document spans rows.

    All tensors have the same shape for every micro-batch of that size, and no value is a Python number, so that a
    compiled block is never recompiled for other documents.
    """

    # int32 [B·T + 1], on the tokens' device: cumulative lengths of all rows' documents (``cu_seqlens``), row after
    # row, padded with B·T.
    ends: Tensor
    # int64 [2], always on the host, so that reading it does not wait for the device: the number of documents, and the
    # longest.
    sizes: Tensor
    # A copy of the cumulative lengths, always on the host: for kernels that go document by document.
    host_ends: Tensor

    @staticmethod
    def of(ids: Tensor) -> Documents:
        """From each token's document number, [B, T] on the host. A document is a run of equal numbers in a row."""
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
    """Cumulative lengths without padding, as a list; synchronises with the device of ``ends``."""
    found: list[int] = ends[: int(sizes[0]) + 1].tolist()
    return found
