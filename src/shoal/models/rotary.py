"""Rotary positions: frequencies, cosine and sine tables, the rotation.

Everything is computed from the positions on the fly, so no buffer must be filled after meta construction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.facts.model import Model, RopeScaling

# Cosine and sine for every position and pair of features.
Rotation = tuple[Tensor, Tensor]


def rotary_width(model: Model) -> int:
    """The number of rotated features per head."""
    if model.latent is not None:
        return model.latent.rope_dim
    return int(model.head_dim * model.rope_fraction)


def frequencies(model: Model, length: int | None, device: torch.device, windowed: bool = False) -> Tensor:
    """Radians per position, one value per pair of rotated features, in fp64.

    Only ``dynamic`` depends on ``length``: rows longer than ``max_positions`` raise the base as transformers does for
    a row of that length. It is a fixed number, not the length of the current batch, which would depend on how rows are
    packed into micro-batches and split over ranks.

    ``windowed``: for layers with a window, if those have a base of their own, which is never scaled.
    """
    width = rotary_width(model)
    scaling = None if windowed else model.rope_scaling
    theta = model.window_theta if windowed and model.window_theta is not None else model.rope_theta
    if scaling is not None and scaling.kind == "dynamic":
        stretch = max(length or 0, model.max_positions) / model.max_positions
        theta *= (scaling.factor * stretch - (scaling.factor - 1)) ** (width / (width - 2))
    pair = torch.arange(width // 2, dtype=torch.float64, device=device)
    plain = theta ** (-2.0 * pair / width)
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        slowed = yarn_share(scaling, theta, width, pair)
    else:
        slowed = llama3_share(scaling, plain)
    return plain * (1 - slowed) + plain / scaling.factor * slowed


def llama3_share(scaling: RopeScaling, plain: Tensor) -> Tensor:
    """How much of each frequency the factor slows: none of the fast ones, all of the slow ones, a ramp in between."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    ramp = (turns - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return 1 - ramp.clamp(0, 1)


def yarn_share(scaling: RopeScaling, theta: float, width: int, pair: Tensor) -> Tensor:
    """Like llama3, but the ramp is linear in the index of the pair (YaRN, arXiv 2309.00071)."""

    def pair_that_turns(turns: float) -> float:
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound counts features instead of pairs, as in transformers and in YaRN's own code.
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return ((pair - low) / (high - low)).clamp(0, 1)


def table_factor(scaling: RopeScaling | None) -> float:
    """YaRN's factor on the tables, which keeps attention as sharp over longer rows."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    if scaling.mscale and scaling.mscale_all_dim:
        return sharpness(scaling.factor, scaling.mscale) / sharpness(scaling.factor, scaling.mscale_all_dim)
    return sharpness(scaling.factor, 1.0)


def sharpness(factor: float, weight: float) -> float:
    """How much sharper attention must be over rows ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def tables(
    model: Model, length: int | None, positions: Tensor, compute: torch.dtype, windowed: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, T, pairs] for positions [B, T]: fp32, or fp64 for fp64 networks."""
    dtype = torch.promote_types(compute, torch.float32)
    turning = frequencies(model, length, positions.device, windowed).to(dtype)
    angles = positions[:, None, :, None].to(dtype) * turning
    factor = table_factor(None if windowed else model.rope_scaling)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first features of every head of x [B, heads, T, head_dim], in the tables' precision.

    A pair is (i, i + half) as in Hugging Face's weights, not (2i, 2i + 1) as in the paper.
    """
    cosine, sine = rotation
    half = cosine.shape[-1]
    rest = x.shape[-1] - 2 * half
    # One split instead of three slices: its backward pass concatenates the parts, while slices would add padded
    # tensors.
    first, second, *others = x.split([half, half, rest] if rest else half, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat([part.to(x.dtype) for part in turned] + others, dim=-1)
