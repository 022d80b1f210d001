"""AdamW's kernel for GPUs: clips, updates and writes the network's working copies of many weights in one launch.

One launch per weight would keep the host busy for longer than a small step takes: 40 µs each, and a deep network has
hundreds. So the kernel takes a table of addresses, and each program looks up its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.models.in_triton import in_triton
from shoal.models.random import FIRST, GOLDEN, SECOND

# Elements per program, and its warps: the best of ten measured settings.
CHUNK, WARPS = 1024, 4
# Numbers per weight that describe its noise (``AdamW._numbers``); the last says whether it is contiguous.
NOISE = 8
# Alignment that vector instructions need: of addresses in bytes, of sizes in elements.
EVEN = 16

# Weights, their gradients, means and squares, and the working copies that the network reads.
States = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
Measured = tuple[Tensor, Tensor, Tensor]
Update = Callable[[States, Measured, tuple[float, ...], Sequence[int]], None]

_LIBRARY = torch.library.Library("shoal", "FRAGMENT")
# Defined by hand: ``torch.library.custom_op`` checks aliasing on every call, which takes the host 28 ms for the 388
# weights of a GPT-2 XL of 24 layers; the kernels take 4.
_LIBRARY.define(
    "adamw_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] squares, "
    "Tensor(d!)[] working, Tensor corrections, Tensor scale, Tensor refused, int[] noise, float lr, float beta1, "
    "float beta2, float eps, float decay) -> ()"
)


def _adamw_(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    working: list[Tensor],
    corrections: Tensor,
    scale: Tensor,
    refused: Tensor,
    noise: list[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    update = kernel()
    assert update is not None
    # Differences computed in fp64, before the kernel receives them in fp32.
    settings = lr, 1 - beta1, beta2, 1 - beta2, eps, lr * decay
    update((weights, gradients, means, squares, working), (corrections, scale, refused), settings, noise)


_LIBRARY.impl("adamw_", _adamw_, "CompositeExplicitAutograd")


@torch.library.register_fake("shoal::adamw_", lib=_LIBRARY)
def _nothing(*arguments: Any) -> None: ...


def adamw_(states: States, measured: Measured, noise: list[int], group: dict[str, Any]) -> None:
    """Update weights with the options of their group.

    ``measured``: the bias corrections of the means and the root of that of the squares; the divisor of gradients; and a
    flag that is 1 if nothing may change. A weight without a copy stands in for it. ``noise``: per weight the numbers of
    ``AdamW._numbers``, if states are rounded stochastically.

    A custom operator, so that a dry run and a memory tracker see it.
    """
    options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    torch.ops.shoal.adamw_(*map(list, states), *measured, noise, *options)


def kernel() -> Update | None:
    """The kernel; None without Triton, where torch's own update is used."""
    return in_triton(_compiled)


class Alike(NamedTuple):
    """What all weights of one launch have in common; known at compile time."""

    dtypes: tuple[torch.dtype, ...]
    copied: bool
    even: bool
    contiguous: bool


def table(states: States, noise: Sequence[int]) -> dict[Alike, list[list[int]]]:
    """For each launch one row per weight: five addresses, size, first chunk, noise."""
    found: dict[Alike, list[list[int]]] = {}
    chunks: dict[Alike, int] = {}
    numbers = len(noise) // max(1, len(states[0]))
    for place, tensors in enumerate(zip(*states, strict=True)):
        size = tensors[0].numel()
        if not size:
            continue
        addresses = [tensor.data_ptr() for tensor in tensors]
        drawn = [*noise[place * numbers : (place + 1) * numbers]] or [0] * NOISE
        even = not (size % EVEN or any(address % EVEN for address in addresses))
        alike = Alike(
            tuple(tensor.dtype for tensor in tensors), addresses[0] != addresses[-1], even, bool(drawn.pop())
        )
        first = chunks.get(alike, 0)
        chunks[alike] = first - (-size // CHUNK)
        found.setdefault(alike, []).append([*addresses, size, first, *drawn])
    return found


@lru_cache(16)
def _owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For each chunk, the row of its weight."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    return torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts).to(device)


def sent(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers to the device without synchronising."""
    here = torch.tensor(numbers)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _compiled(triton: Any, tl: Any) -> Update:
    @triton.jit
    def update_chunk(
        rows,
        owners,
        # One tensor of each kind, whose dtype all the others share.
        weights,
        gradients,
        means,
        squares,
        working,
        corrections,
        scale,
        refused,
        lr,
        rise1,
        beta2,
        rise2,
        eps,
        decay,
        width: tl.constexpr,
        rounds: tl.constexpr,
        contiguous: tl.constexpr,
        copied: tl.constexpr,
        even: tl.constexpr,
        block: tl.constexpr,
        golden: tl.constexpr,
        mix1: tl.constexpr,
        mix2: tl.constexpr,
    ):
        if tl.load(refused) == 0:
            chunk = tl.program_id(0)
            row = rows + tl.load(owners + chunk) * width
            weights = tl.load(row + 0).to(weights.dtype)
            gradients = tl.load(row + 1).to(gradients.dtype)
            means = tl.load(row + 2).to(means.dtype)
            squares = tl.load(row + 3).to(squares.dtype)
            working = tl.load(row + 4).to(working.dtype)
            size = tl.load(row + 5)
            if even:
                weights = tl.multiple_of(weights, 16)
                gradients = tl.multiple_of(gradients, 16)
                means = tl.multiple_of(means, 16)
                squares = tl.multiple_of(squares, 16)
                working = tl.multiple_of(working, 16)
                size = tl.multiple_of(size, 16)
            at = (chunk - tl.load(row + 6)) * block + tl.arange(0, block)
            here = at < size
            gradient = tl.load(gradients + at, here).to(tl.float32) / tl.load(scale)
            weight = tl.load(weights + at, here).to(tl.float32)
            mean = tl.load(means + at, here).to(tl.float32)
            square = tl.load(squares + at, here).to(tl.float32)
            weight -= decay * weight
            mean += (gradient - mean) * rise1
            square = square * beta2 + gradient * gradient * rise2
            root = tl.sqrt_rn(square) / tl.load(corrections + 1) + eps
            weight -= lr / tl.load(corrections) * (mean / root)
            if rounds:
                # ``models.random.bits`` of an element's index in the parameter, then ``train.rounding.round_``.
                key = tl.load(row + 7)
                index = at + tl.load(row + 8)
                if not contiguous:
                    run = tl.load(row + 9)
                    length = tl.load(row + 10)
                    within = index % run
                    index = index // run * tl.load(row + 11) + within // length * tl.load(row + 12)
                    index += within % length
                drawn = (index + tl.load(row + 13) + 1).to(tl.uint64) * golden + key.to(tl.uint64)
                drawn = (drawn ^ (drawn >> 30)) * mix1
                drawn = (drawn ^ (drawn >> 27)) * mix2
                drawn = drawn ^ (drawn >> 31)
                for_weight = (drawn & 0xFFFF).to(tl.int32)
                for_mean = ((drawn >> 16) & 0xFFFF).to(tl.int32)
                for_square = ((drawn >> 32) & 0xFFFF).to(tl.int32)
                upper = -65536
                weight = ((weight.to(tl.int32, bitcast=True) + for_weight) & upper).to(
                    tl.float32, bitcast=True
                )
                mean = ((mean.to(tl.int32, bitcast=True) + for_mean) & upper).to(tl.float32, bitcast=True)
                square = ((square.to(tl.int32, bitcast=True) + for_square) & upper).to(
                    tl.float32, bitcast=True
                )
            tl.store(weights + at, weight.to(weights.dtype.element_ty), here)
            tl.store(means + at, mean.to(means.dtype.element_ty), here)
            tl.store(squares + at, square.to(squares.dtype.element_ty), here)
            if copied:
                tl.store(working + at, weight.to(working.dtype.element_ty), here)

    def update(states: States, measured: Measured, settings: tuple[float, ...], noise: Sequence[int]) -> None:
        device = states[0][0].device
        for alike, rows in table(states, noise).items():
            owners = _owners(tuple(row[5] for row in rows), device)
            update_chunk[(len(owners),)](
                sent(rows, device),
                owners,
                *(torch.empty(0, dtype=dtype, device=device) for dtype in alike.dtypes),
                *measured,
                *settings,
                len(rows[0]),
                bool(noise),
                alike.contiguous,
                alike.copied,
                alike.even,
                CHUNK,
                *(constant % 2**64 for constant in (GOLDEN, FIRST, SECOND)),
                num_warps=WARPS,
            )

    return update
