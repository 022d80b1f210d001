"""Digests of live tensors, computed on their device: one number per block and one per tensor.

A word is an element, or half of one that has 64 bits. Within a block every word, taken as an integer, is multiplied by
its own odd number, modulo 2⁶⁴. An odd multiple of a difference below 2³² is never 0 there, so a change of one word,
even of a single bit, always changes its block's number. So do two bits that flip in different words of a block, because
no two of the odd numbers are equal or opposite in their lower 33 bits. Block numbers are mixed with their place, one to
one, and added: a change in a single block always changes the sum, and anything else is missed about once in 2⁶⁴ times.
This detects accidents; it is no defence against an attacker.

A cryptographic hash would need the bytes on the host, and is several times slower even there. On a GPU one kernel reads
every word once, at memory bandwidth; with torch operators the products would be written and read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shoal.models.random import bits, key

# In words.
BLOCK = 4096
# Blocks processed at once, whose products take 32 MiB. With fewer, the threads of a shared CPU spend most of their time
# waiting for each other.
AT_ONCE = 1024
# With fewer, a GPU finishes before its host has issued the next batch.
AT_ONCE_ON_GPU = 4096

# The integer type of a word, by its bytes.
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}

# Takes tensors and, for every block, the index of its tensor and its place there; returns the blocks' numbers.
Numbers = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Digests:
    """Of several tensors: the numbers of all their blocks, concatenated, and one number per tensor."""

    blocks: Tensor
    counts: tuple[int, ...]
    totals: Tensor

    def changed_blocks(self, now: Digests) -> list[list[int]]:
        """For each tensor, the blocks that have changed."""
        return [
            torch.nonzero(before != after).flatten().tolist()
            for before, after in zip(
                self.blocks.split(self.counts), now.blocks.split(now.counts), strict=True
            )
        ]


@torch.no_grad()
def digest(tensors: Sequence[Tensor], device: torch.device) -> Digests:
    """Asynchronous: on a GPU the work is only issued; reading the result waits for it."""
    counts = tuple(-(-tensor.nbytes // (BLOCK * _word_bytes(tensor))) for tensor in tensors)
    ends, sizes, _, place = _places(counts, device)
    here = [number for number, tensor in enumerate(tensors) if tensor.device == device]
    numbers = _kernel(device) if device.type == "cuda" else None
    _, _, owner, own_place = _places([counts[number] for number in here], device)
    found = (numbers or _in_torch)([tensors[number] for number in here], owner, own_place)
    if len(here) < len(tensors):
        # Host tensors are digested on the host: a device may have no room for them.
        split = iter(found.split([counts[number] for number in here]))
        mine = set(here)
        found = torch.cat(
            [
                next(split) if number in mine else _block_numbers(tensor).to(device)
                for number, tensor in enumerate(tensors)
            ]
        )
    blocks = found
    # Integer sums do not depend on order. A tensor's sum is a difference of cumulative sums.
    sums = torch.cat([blocks.new_zeros(1), bits(blocks, place).cumsum(0)])
    return Digests(blocks, counts, sums[ends] - sums[ends - sizes])


def _places(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where tensors of this many blocks end, the counts, and for every block its tensor and its place there."""
    sizes = torch.tensor(counts, dtype=torch.int64).to(device, non_blocking=True)
    ends = sizes.cumsum(0)
    owner = torch.repeat_interleave(sizes, output_size=sum(counts))
    return ends, sizes, owner, torch.arange(owner.numel(), device=device) - (ends - sizes)[owner]


def prepare(device: torch.device) -> None:
    """Compile and load what digests need; otherwise training would wait at the first digest."""
    if device.type == "cuda":
        digest([torch.zeros(1, device=device)], device).totals.tolist()


def _word_bytes(values: Tensor) -> int:
    """Bytes per word: the element size, or half of it for 64-bit elements."""
    return min(values.element_size(), 4)


@cache
def _weights(device: torch.device) -> Tensor:
    return bits(key(0, 0, "weights of a digest"), torch.arange(BLOCK, device=device)) | 1


# With torch operators.


def _in_torch(tensors: Sequence[Tensor], owner: Tensor, place: Tensor) -> Tensor:
    return torch.cat([owner.new_empty(0), *(_block_numbers(tensor) for tensor in tensors)])


def _block_numbers(values: Tensor) -> Tensor:
    words = values.detach().reshape(-1).view(WORDS[_word_bytes(values)])
    weights = _weights(values.device)
    whole = words.numel() // BLOCK * BLOCK
    at_once = AT_ONCE if values.device.type == "cpu" else AT_ONCE_ON_GPU
    numbers = [
        (rows * weights).sum(1) for rows in words[:whole].view(-1, BLOCK).split(at_once) if rows.numel()
    ]
    if whole < words.numel():
        rest = words[whole:]
        numbers.append((rest * weights[: rest.numel()]).sum().view(1))
    return torch.cat(numbers) if numbers else weights[:0]


# With one kernel.


@cache
def _kernel(device: torch.device) -> Numbers | None:
    """One launch that computes the numbers of all blocks of all tensors; None if it is unavailable."""
    try:
        numbers = _compiled(import_module("triton"), import_module("triton.language"))
        sample = [
            torch.arange(BLOCK + 3, device=device).to(dtype).sub_(7)
            for dtype in (torch.float32, torch.bfloat16)
        ]
        owner = torch.tensor([0, 0, 1, 1], device=device)
        place = torch.tensor([0, 1, 0, 1], device=device)
        same = torch.equal(numbers(sample, owner, place), _in_torch(sample, owner, place))
    except Exception:
        # Whatever is missing, Triton or its compiler: torch operators give the same numbers.
        return None
    return numbers if same else None


def _compiled(triton: Any, tl: Any) -> Numbers:
    @triton.jit
    def block_number(
        blocks, table, owner, place, weights, size: tl.constexpr, width: tl.constexpr, word: tl.constexpr
    ):
        block = tl.program_id(0)
        row = table + tl.load(owner + block) * 3
        if tl.load(row + 2) == width:
            within = tl.load(place + block) * size + tl.arange(0, size)
            first = tl.load(row).to(tl.pointer_type(word))
            words = tl.load(first + within, mask=within < tl.load(row + 1), other=0)
            number = tl.sum(words.to(tl.int64) * tl.load(weights + tl.arange(0, size)))
            tl.store(blocks + block, number)

    kinds = {4: tl.int32, 2: tl.int16, 1: tl.int8}

    def numbers(tensors: Sequence[Tensor], owner: Tensor, place: Tensor) -> Tensor:
        dense = [tensor.contiguous() for tensor in tensors]
        widths = [_word_bytes(tensor) for tensor in dense]
        # Each tensor's address, number of words, and bytes per word.
        rows = [
            (tensor.data_ptr(), tensor.nbytes // width, width)
            for tensor, width in zip(dense, widths, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.int64).to(owner.device, non_blocking=True)
        blocks = torch.empty_like(owner)
        # One launch per word size, which skips the blocks of other sizes.
        for width in set(widths) if owner.numel() else ():
            block_number[(owner.numel(),)](
                blocks, table, owner, place, _weights(owner.device), BLOCK, width, kinds[width]
            )
        return blocks

    return numbers
