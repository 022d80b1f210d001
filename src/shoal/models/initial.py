"""Weight initialisation: each element is a hash of the seed, the parameter's name and its index in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.facts.model import Model
from shoal.facts.model.parameters import LORA_FACTORS, MAGNITUDE
from shoal.models import random

# Projections that write to the residual stream: attention's, and the MLP's or every expert's.
RESIDUAL = ("self_attn.o_proj.weight", "down_proj.weight")


class Slice(NamedTuple):
    """The part of a parameter held here: the tensor to fill, and its box within the whole parameter."""

    local: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    # For values in a file, where ``local`` is only a shape: read and write them.
    read: Callable[[], Tensor] | None = None
    write: Callable[[Tensor], None] | None = None

    @property
    def values(self) -> Tensor:
        """The values, read from the file if they are there."""
        return self.local if self.read is None else self.read()


# Called with the slices that a rank updates, by canonical name, to give them their initial values.
Fill = Callable[[list[tuple[str, Slice]]], None]


def no_weights(slices: list[tuple[str, Slice]]) -> None:
    """Skip initialisation: a checkpoint will provide the weights."""


def whole(name: str, parameter: Tensor) -> Slice:
    """The slice of a parameter that is not split."""
    return Slice(parameter.data, tuple(parameter.shape), (0,) * parameter.dim())


def initialise(
    network: nn.Module,
    model: Model,
    seed: int,
    slice_of: Callable[[str, nn.Parameter], Slice] = whole,
) -> None:
    """Initialise every parameter; they must have left the meta device (``to_empty``).

    Matrices and embeddings are normal(0, init_std); those that write to the residual stream are divided by
    √(2·layers), as in GPT-2, for every family, so that the stream does not grow with depth. Norms start at one (at
    zero if they add one), biases at zero. Of LoRA's factors B starts at zero, and A is normal with the variance of
    PEFT's uniform numbers, 1 / (3·inputs). ``slice_of`` says which part of a sharded parameter is here; a network with
    only some of the parameters (a pipeline stage) fills those, as long as they keep their names.
    """
    fill(((name, slice_of(name, parameter)) for name, parameter in network.named_parameters()), model, seed)


@torch.no_grad()
def fill(slices: Iterable[tuple[str, Slice]], model: Model, seed: int) -> None:
    """Like ``initialise``, for the given slices."""
    for name, (local, global_shape, offset, *_) in slices:
        if name.endswith(("bias", f"{LORA_FACTORS[1]}.weight")):
            local.zero_()
        elif name.endswith(f"{LORA_FACTORS[0]}.weight"):
            std = 1 / math.sqrt(3 * global_shape[1])
            random.fill_normal_(local, random.key(seed, 0, name), std, global_shape, offset)
        elif name.endswith(MAGNITUDE):
            local.fill_(1)
        elif name.endswith("norm.weight"):
            local.fill_(0 if model.norm_offset else 1)
        else:
            std = model.init_std / math.sqrt(2 * model.layers) if name.endswith(RESIDUAL) else model.init_std
            random.fill_normal_(local, random.key(seed, 0, name), std, global_shape, offset)
