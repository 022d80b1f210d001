"""Of a rank's optimizer states or parameters, the share that is offloaded: cut between tensors, as the engine does."""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.layout import Layout
from shoal.facts.layout.offload import offloaded, waiting
from shoal.facts.layout.parameter_groups import DENSE, EXPERTS
from shoal.facts.layout.ranks import stride
from shoal.facts.layout.updates import updated_ranges
from shoal.facts.model import Model
from shoal.facts.model.parameters import block_of
from shoal.predict.optimizer_matrices import sharing_of
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
    sizes = _sizes(workload.model, degrees, layout, workload.cut_by, stage)
    return sum(sizes[offloaded(sizes, part.fraction) :]) / sum(sizes)


def largest_piece(workload: Workload, stage: int) -> int:
    """Elements of the largest piece whose states are offloaded, of those that pipeline rank ``stage`` updates."""
    part, groups = waiting(workload.layout.offload, "optimizer"), workload.groups
    assert part is not None
    dense, routed = groups[DENSE].sharded.size, groups.get(EXPERTS, groups[DENSE]).sharded.size
    if workload.layout.zero < 3 and dense > 1:
        # Cut where chunks of buckets are: a piece may be a whole parameter.
        ranges = updated_ranges(sharing_of(workload), stage * stride("pp", workload.layout))
        sizes = tuple(one.stop - one.start for one in ranges)
    else:
        degrees = ShardDegrees(workload.layout.tp, workload.layout.ep, dense, routed)
        sizes = _sizes(workload.model, degrees, workload.layout, workload.cut_by, stage)
    return max(sizes[offloaded(sizes, part.fraction) :], default=0)


@lru_cache(maxsize=4096)
def _sizes(
    model: Model, degrees: ShardDegrees, layout: Layout, seq: int | None, stage: int
) -> tuple[int, ...]:
    """Of a rank's pieces, in forward order."""
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
    return tuple(sizes)


def _layer(name: str, layers: int) -> int:
    """The number of a tensor's block; the network's ends are before and after all of them."""
    if (block := block_of(name)) is not None:
        return block
    return -1 if name.startswith(EMBEDDINGS) else layers
