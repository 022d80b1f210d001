"""Random numbers without a generator: each is a hash of a key and an index.

There is no state and no rank involved, so the same number is drawn wherever and in whatever order it is needed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def signed(value: int) -> int:
    """The int64 with the same 64 bits, since torch has no unsigned arithmetic."""
    return (value + 2**63) % 2**64 - 2**63


# splitmix64's constants (Steele, Lea, Flood 2014; Stafford's thirteenth mix).
GOLDEN = signed(0x9E3779B97F4A7C15)
FIRST = signed(0xBF58476D1CE4E5B9)
SECOND = signed(0x94D049BB133111EB)

# Elements filled at once: on a CPU the temporaries stay in cache, elsewhere a kernel is large enough.
CHUNK_CPU = 2**16
CHUNK = 2**22


def key(seed: int, step: int, name: str) -> int:
    """The int64 key for one use of randomness: ``key(seed, 0, "model.norm.weight")``."""
    digest = hashlib.blake2b(f"{seed}:{step}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits for each index, as int64. A tensor of keys broadcasts against the indices."""
    # ~index is −(index + 1), since splitmix64 counts from one. Written this way because the compiler takes an arange
    # times a constant for address arithmetic, which is 32 bits wide.
    state = ~index * -GOLDEN + key
    if not torch.compiler.is_compiling():
        return _mix_in_place(state)
    state = (state ^ shift(state, 30)) * FIRST
    state = (state ^ shift(state, 27)) * SECOND
    return state ^ shift(state, 31)


def _mix_in_place(state: Tensor) -> Tensor:
    """The same steps operator by operator, with a single temporary: more would not stay in the cache."""
    moved = torch.empty_like(state)
    for count, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(state, count, out=moved)
        state ^= moved.bitwise_and_(2 ** (64 - count) - 1)
        if factor != 1:
            state *= factor
    return state


def shift(value: Tensor, count: int) -> Tensor:
    """A logical right shift: torch's own copies the sign bit, which the mask clears."""
    return torch.bitwise_and(value >> count, 2 ** (64 - count) - 1)


def uniform(key: int | Tensor, index: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers strictly between 0 and 1, in ``dtype``, symmetric about a half."""
    # As many bits as the type can hold in addition to the half: the result is exact, so it never rounds to 0 or 1.
    digits = round(-math.log2(torch.finfo(dtype).eps))
    return ((shift(bits(key, index), 64 - digits).double() + 0.5) * 2.0**-digits).to(dtype)


def normal(key: int | Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by Box–Muller, rounded to fp32 and then to ``dtype``.

    Half of the 64 bits give the radius and half the angle, so no number exceeds 6.8. The logarithm and the cosine are
    written out in IEEE additions and multiplications because libraries (and their vectorised and scalar loops) differ
    in the last bit; this way a slice equals the whole and a GPU equals a CPU.
    """
    drawn = bits(key, index)
    first = (shift(drawn, 32).double() + 0.5) * 2.0**-32
    second = ((drawn & (2**32 - 1)).double() + 0.5) * 2.0**-32
    radius = (logarithm(first) * -2.0).sqrt()
    return (radius * cosine_of_turns(second)).float().to(dtype)


def logarithm(value: Tensor) -> Tensor:
    """ln of positive numbers: 2·atanh((m − 1)/(m + 1)) of the mantissa m, plus the exponent's part."""
    mantissa, exponent = torch.frexp(value)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.double() - small.double()
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = polynomial(ratio * ratio, [2.0 / (2 * power + 1) for power in range(10)])
    return ratio * series + exponent * math.log(2.0)


def cosine_of_turns(turns: Tensor) -> Tensor:
    """cos(2π·turns) for turns in [0, 1]: −sin of an angle folded into a quarter turn."""
    angle = (0.25 - (turns - 0.5).abs()) * (2.0 * math.pi)
    series = polynomial(
        angle * angle, [(-1.0) ** power / math.factorial(2 * power + 1) for power in range(11)]
    )
    return -(angle * series)


def polynomial(value: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule; coefficients start with the lowest power."""
    total = torch.full_like(value, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        # Two separate operations: a fused multiply-add would round differently between devices.
        total.mul_(value).add_(coefficient)
    return total


@torch.no_grad()
def fill_normal_(
    tensor: Tensor, key: int, std: float, global_shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Fill ``tensor``, the box at ``offset`` of a tensor of ``global_shape``, with normal(0, std).

    Each element depends only on its index in the global tensor, so boxes are bit-equal to the whole.
    """
    if tensor.numel() == 0:
        return
    # The index of the first element of every row; columns count on from there.
    starts = torch.zeros((), dtype=torch.int64, device=tensor.device)
    stride = math.prod(global_shape)
    for size, whole, begin in zip(tensor.shape[:-1], global_shape[:-1], offset[:-1], strict=True):
        stride //= whole
        along = torch.arange(begin, begin + size, device=tensor.device) * stride
        starts = starts.unsqueeze(-1) + along
    starts = (starts + offset[-1]).reshape(-1, 1)

    chunk = CHUNK_CPU if tensor.device.type == "cpu" else CHUNK
    columns = tensor.shape[-1]
    rows_at_once = max(1, chunk // columns)
    local = tensor.view(-1, columns)
    for row in range(0, local.shape[0], rows_at_once):
        for column in range(0, columns, chunk):
            target = local[row : row + rows_at_once, column : column + chunk]
            along = torch.arange(column, column + target.shape[1], device=tensor.device)
            target.copy_(normal(key, starts[row : row + rows_at_once] + along) * std)
