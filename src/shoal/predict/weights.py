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

AdapterKey = tuple[int, tuple[str, ...]]


class ParameterCount(NamedTuple):
    """Parameters of one rank of a tensor group, the one that holds the most. LoRA's factors are only ``trained``."""

    whole: int = 0  # as they are used
    share: int = 0  # the rows of them that the first of the ranks that shard them keeps
    trained: int = 0
    trained_share: int = 0

    def times(self, count: int) -> ParameterCount:
        return ParameterCount(*(count * value for value in self))


class NetworkEnds(NamedTuple):
    embedding: ParameterCount  # with learned positions
    norm: ParameterCount
    head: ParameterCount  # of a tied model too: where it is a copy


class ShardDegrees(NamedTuple):
    """Over how many ranks parameters are shared out."""

    tp: int
    ep: int
    ranks: int  # that shard what every data rank has
    expert_ranks: int  # that shard an expert


def total(counts: Iterable[ParameterCount]) -> ParameterCount:
    return ParameterCount(*map(sum, zip(*counts, strict=True)))


@lru_cache(maxsize=4096)
def block(model: Model, experts: bool, degrees: ShardDegrees, lora: AdapterKey | None) -> ParameterCount:
    """One block, with routed experts or with an ordinary MLP."""
    parameters = block_parameters(model, experts)
    found = _counted(parameters, degrees.tp, degrees.ranks, lora is None)
    if experts and model.experts:
        each = _counted(expert_parameters(model), degrees.tp, degrees.expert_ranks, lora is None)
        found = total((found, each.times(model.experts.count // degrees.ep)))
    if lora is None:
        return found
    factors = [factor for parameter in parameters for factor in adapters(parameter, *lora)]
    added = _counted(factors, degrees.tp, degrees.ranks)
    return found._replace(trained=added.trained, trained_share=added.trained_share)


@lru_cache(maxsize=1024)
def ends(model: Model, degrees: ShardDegrees, trained: bool = True) -> NetworkEnds:
    """What stands before the first block and after the last one."""
    found = end_parameters(model)
    return NetworkEnds(*(_counted(one, degrees.tp, degrees.ranks, trained) for one in found))


def adapter_key(lora: Lora | None) -> AdapterKey | None:
    """What matters of LoRA here, as a key that can be hashed."""
    return None if lora is None else (lora.rank, tuple(lora.targets))


def _counted(parameters: Iterable[Parameter], tp: int, ranks: int, trained: bool = True) -> ParameterCount:
    """Every parameter is cut by rows; rows that do not divide are padded."""
    whole = share = 0
    for parameter in parameters:
        rows, *rest = tensor_part(parameter, tp, 0).box.shape
        width = math.prod(rest)
        whole, share = whole + rows * width, share + even_share(rows, ranks) * width
    return ParameterCount(whole, share, *((whole, share) if trained else (0, 0)))
