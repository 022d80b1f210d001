"""Of a rank's optimizer states or parameters, the share that is offloaded: cut between tensors, as the engine does."""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.layout import Layout
from shoal.facts.layout.offload import offloaded, waiting
from shoal.facts.layout.parameter_groups import DENSE, EXPERTS
from shoal.facts.model import Model
from shoal.facts.model.parameters import block_of
from shoal.predict.rank_parameters import (
    ShardDegrees,
    expert_tensors,
    named_tensors,
    padded_size,
    rank_parameters,
)
from shoal.predict.workload import Workload

EMBEDDINGS = "model.embed_"  # of tokens, and of learned positions


def share_away(workload: Workload, what: str, stage: int = 0) -> float:
    """``what``: optimizer, params or activations; of pipeline rank ``stage``."""
    part = waiting(workload.layout.offload, what)
    if part is None:
        return 0.0
    # Of activations whole blocks are. LoRA's factors are too small to look for the cut.
    adapters = workload.lora is not None and what == "optimizer"
    if part.fraction == 1.0 or what == "activations" or adapters:
        return part.fraction
    layout, groups = workload.layout, workload.groups
    dense, routed = groups[DENSE], groups.get(EXPERTS, groups[DENSE])
    shards = dense.sharded.size, routed.sharded.size
    if what == "params" and not dense.fully_sharded:
        shards = 1, 1
    degrees = ShardDegrees(layout.tp, layout.ep, *shards)
    return _cut(workload.model, degrees, layout, workload.cut_by, stage, part.fraction)


@lru_cache(maxsize=4096)
def _cut(
    model: Model, degrees: ShardDegrees, layout: Layout, seq: int | None, stage: int, fraction: float
) -> float:
    here = rank_parameters(layout, model, seq, stage)
    sizes = []
    for one in here.stages:
        whole = [(tensor, degrees.ranks) for tensor in named_tensors(here, model, one)]
        whole += [
            (tensor, degrees.expert_ranks) for tensor in expert_tensors(model, degrees.tp, degrees.ep, one)
        ]
        # Routed experts come after the other parameters of their block.
        whole.sort(key=lambda pair: _layer(pair[0].label, model.layers))
        sizes += [padded_size(tensor, ranks) // ranks for tensor, ranks in whole]
    return sum(sizes[offloaded(sizes, fraction) :]) / sum(sizes)


def _layer(name: str, layers: int) -> int:
    """The number of a tensor's block; the network's ends are before and after all of them."""
    if (block := block_of(name)) is not None:
        return block
    return -1 if name.startswith(EMBEDDINGS) else layers
