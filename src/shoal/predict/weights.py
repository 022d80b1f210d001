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
from shoal.facts.parameters import Parameter, llama_parameters

# Latent attention's projections out of the bottleneck make heads, so tensor ranks share them as they share heads.
LATENT_HEADS = ("q_b_proj", "kv_b_proj")

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
    dense = [_local(model, parameter, split.tp) for parameter in _block_parameters(model, experts)]
    routed: list[Shape] = []
    if experts and model.experts is not None:
        inner = even_share(model.experts.ffn, split.tp)
        one: list[Shape] = [(inner, model.hidden), (inner, model.hidden), (model.hidden, inner)]
        routed = one * (model.experts.count // split.ep)
    added = _adapters(model, experts, split.tp, lora) if lora else []
    return Part(
        _size(dense),
        _size(routed),
        _size(added),
        _share(dense, split.ranks),
        _share(routed, split.expert_ranks),
        _share(added, split.ranks),
    )


@lru_cache(maxsize=1024)
def ends(model: Model, split: Split) -> Ends:
    """What stands before the first block and after the last one."""
    parts: dict[str, list[Shape]] = {"embedding": [], "norm": [], "head": []}
    for parameter in llama_parameters(model.model_copy(update={"layers": 0, "tied": False})):
        kind = "embedding" if parameter.kind == "position" else parameter.kind
        parts[kind].append(_local(model, parameter, split.tp))
    return Ends(
        *(
            Part(_size(shapes), 0, 0, _share(shapes, split.ranks))
            for shapes in (parts["embedding"], parts["norm"], parts["head"])
        )
    )


def adapters(lora: Lora | None) -> tuple[int, tuple[str, ...]] | None:
    """What matters of LoRA here, as a key that can be hashed."""
    return None if lora is None else (lora.rank, tuple(lora.targets))


@lru_cache(maxsize=256)
def _block_parameters(model: Model, experts: bool) -> tuple[Parameter, ...]:
    """The tensors of one block, but for routed experts."""
    changes: dict[str, object] = {"layers": 1}
    if model.experts is not None:
        changes["experts"] = model.experts.model_copy(update={"dense_layers": () if experts else (0,)})
    one = model.model_copy(update=changes)
    return tuple(parameter for parameter in llama_parameters(one) if parameter.layer is not None)


def _local(model: Model, parameter: Parameter, tp: int) -> Shape:
    rows, *rest = parameter.shape
    if parameter.name.rsplit(".", 2)[-2] in LATENT_HEADS:
        return even_share(rows, tp), *rest
    return tensor_part(parameter.name, parameter.shape, model, tp, 0).box.shape


def _adapters(model: Model, experts: bool, tp: int, lora: tuple[int, tuple[str, ...]]) -> list[Shape]:
    """Two thin matrices for every projection that gets an addition; the one beside a split side is split too."""
    rank, targets = lora
    shapes: list[Shape] = []
    for parameter in _block_parameters(model, experts):
        if len(parameter.shape) == 2 and parameter.name.rsplit(".", 2)[-2] in targets:
            outputs, inputs = _local(model, parameter, tp)
            shapes += [(rank, inputs), (outputs, rank)]
    return shapes


def _size(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _share(shapes: Iterable[Shape], ranks: int) -> int:
    """Every parameter is cut by rows; rows that do not divide are padded."""
    return sum(even_share(shape[0], ranks) * math.prod(shape[1:]) for shape in shapes)
