"""How many parameters a rank holds: of a block, and of the two ends of the network, split and sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from shoal.facts.boxes import tensor_part
from shoal.facts.config import Lora
from shoal.facts.groups import even_share
from shoal.facts.model import Model
from shoal.facts.parameters import (
    Parameter,
    adapters,
    block_parameters,
    end_parameters,
    expert_parameters,
)

Shape = tuple[int, ...]


class Part(NamedTuple):
    """Parameters of one rank of a tensor group, the one that holds the most."""

    dense: int = 0  # every data rank has these
    expert: int = 0  # routed experts, shared out over ``ep`` ranks
    adapter: int = 0  # LoRA's additions
    share: int = 0  # of ``dense``, the rows that the first of the ranks that shard it holds
    expert_share: int = 0
    adapter_share: int = 0

    @property
    def whole(self) -> int:
        return self.dense + self.expert


class Ends(NamedTuple):
    embedding: Part  # with learned positions
    norm: Part
    head: Part  # of a tied model too: where it is a copy


class Split(NamedTuple):
    """Over how many ranks parameters are shared out."""

    tp: int
    ep: int
    ranks: int  # that shard what every data rank has
    expert_ranks: int  # that shard an expert


@lru_cache(maxsize=4096)
def block(model: Model, experts: bool, split: Split, lora: tuple[int, tuple[str, ...]] | None) -> Part:
    """One block, with routed experts or with an ordinary MLP."""
    parameters = block_parameters(model, experts)
    routed = expert_parameters(model) * (model.experts.count // split.ep) if experts and model.experts else ()
    added = [factor for parameter in parameters for factor in adapters(parameter, *lora)] if lora else []
    dense, routed_shapes, added_shapes = (_local(one, split.tp) for one in (parameters, routed, added))
    return Part(
        _size(dense),
        _size(routed_shapes),
        _size(added_shapes),
        _share(dense, split.ranks),
        _share(routed_shapes, split.expert_ranks),
        _share(added_shapes, split.ranks),
    )


@lru_cache(maxsize=1024)
def ends(model: Model, split: Split) -> Ends:
    """What stands before the first block and after the last one."""
    found = [_local(parameters, split.tp) for parameters in end_parameters(model)]
    return Ends(*(Part(_size(shapes), 0, 0, _share(shapes, split.ranks)) for shapes in found))


def adapter_key(lora: Lora | None) -> tuple[int, tuple[str, ...]] | None:
    """What matters of LoRA here, as a key that can be hashed."""
    return None if lora is None else (lora.rank, tuple(lora.targets))


def _local(parameters: Iterable[Parameter], tp: int) -> list[Shape]:
    return [tensor_part(parameter, tp, 0).box.shape for parameter in parameters]


def _size(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _share(shapes: Iterable[Shape], ranks: int) -> int:
    """Every parameter is cut by rows; rows that do not divide are padded."""
    return sum(even_share(shape[0], ranks) * math.prod(shape[1:]) for shape in shapes)
