"""Digests of live tensors, made on the device where they lie: one number a block, and one a tensor.

A word is an element, or a half of one that has 64 bits. Within a block every word is taken as an integer and counts
times an odd number of its own, modulo 2⁶⁴. An odd multiple of a difference below 2³² is never 0 there, so a change of
one word, be it a single bit, changes its block's number for certain. So do two bits that flip in different words of a
block, for no two of the odd numbers are alike, or opposite, in their lower 33 bits. Blocks are mixed with their place,
one to one, and added: what changes one of them changes the sum for certain, and anything else is missed once in 2⁶⁴
times or so. It detects accidents; it is no defence against somebody who knows it.

A cryptographic hash would need the bytes on the host, and takes several times as long even there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shoal.models.random import bits, key

# Words.
BLOCK = 4096
# Blocks taken at once, for which there are 32 MiB of products for a moment. With fewer, the threads of a CPU that is
# shared spend most of their time in waiting for each other.
AT_ONCE = 1024


@dataclass(frozen=True)
class Digests:
    """Of several tensors: the numbers of all their blocks, one after another, and one number for each tensor."""

    blocks: Tensor
    counts: tuple[int, ...]
    totals: Tensor

    def changed_blocks(self, now: Digests) -> list[list[int]]:
        """For each tensor, the blocks in which it has changed."""
        return [
            torch.nonzero(before != after).flatten().tolist()
            for before, after in zip(
                self.blocks.split(self.counts), now.blocks.split(now.counts), strict=True
            )
        ]


@torch.no_grad()
def digest(tensors: Sequence[Tensor], device: torch.device) -> Digests:
    """Nothing is waited for: on a GPU the work is issued, and done when somebody looks."""
    every = [_block_numbers(tensor.to(device)) for tensor in tensors]
    counts = tuple(blocks.numel() for blocks in every)
    blocks = torch.cat(every) if every else torch.empty(0, dtype=torch.int64, device=device)
    sizes = torch.tensor(counts, dtype=torch.int64)
    owner = torch.arange(len(counts)).repeat_interleave(sizes)
    place = torch.arange(blocks.numel()) - (sizes.cumsum(0) - sizes)[owner]
    totals = torch.zeros(len(counts), dtype=torch.int64, device=device)
    # Integers: whatever the order in which they are added, the sum is the same.
    totals.index_add_(0, owner.to(device), bits(blocks, place.to(device)))
    return Digests(blocks, counts, totals)


def _block_numbers(values: Tensor) -> Tensor:
    words = _words(values)
    weights = _weights(values.device)
    whole = words.numel() // BLOCK * BLOCK
    numbers = [
        (rows * weights).sum(1) for rows in words[:whole].view(-1, BLOCK).split(AT_ONCE) if rows.numel()
    ]
    if whole < words.numel():
        rest = words[whole:]
        numbers.append((rest * weights[: rest.numel()]).sum().view(1))
    return torch.cat(numbers) if numbers else weights[:0]


def _words(values: Tensor) -> Tensor:
    """The bits as integers of the elements' own size, or of 32 bits where that is larger."""
    size = min(values.element_size(), 4)
    return values.detach().reshape(-1).view({4: torch.int32, 2: torch.int16, 1: torch.int8}[size])


@cache
def _weights(device: torch.device) -> Tensor:
    return bits(key(0, 0, "weights of a digest"), torch.arange(BLOCK, device=device)) | 1
