"""Bytes that torch's CUDA allocator adds to weights and states by rounding up their blocks.

It cuts large blocks out of segments of whole 2 MiB, and leaves a remainder of at most 1 MiB unsplit with its block.
Power-of-two sizes lose nothing; a 1,600 × 6,400 matrix in fp32 loses 0.94 of 40 MiB, and GPT-2 XL loses 2 % of its
weights and states this way. Temporaries of a step are cut from free blocks of any size, so their loss is unpredictable
and not counted. Expandable segments, if the user enables them, lose nothing either.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.layout.parameter_groups import DENSE, EXPERTS
from shoal.facts.optimizers import states_per_element
from shoal.predict.memory.inventory import RankInventory
from shoal.predict.rank_parameters import Component, expert_stack, padded_size, rank_parameters

MIB = 2**20
# torch's allocator: blocks above 1 MiB come from 20 MiB segments; from 10 MiB on, from segments of their own.
SHARED_SEGMENT, OWN_SEGMENT, STEP = 20 * MIB, 10 * MIB, 2 * MIB
UNSPLIT = MIB  # the largest remainder that stays with a block


def allocated_size(size: float) -> float:
    """Bytes that a tensor of ``size`` occupies in a fresh segment; on average, for those that share one."""
    if size <= MIB:
        return size
    together = 1 if size >= OWN_SEGMENT else int(SHARED_SEGMENT // size)
    segment = -(-size // STEP) * STEP if size >= OWN_SEGMENT else SHARED_SEGMENT
    left = segment - together * size
    return size + (left / together if left <= UNSPLIT else 0)


def allocator_remainders(rank: RankInventory) -> float:
    """Bytes lost on a rank of our engine, whose weights and states are separate tensors."""
    workload, hold = rank.workload, rank.hold
    if (
        workload.cluster.device.name == "cpu"
        or workload.stack.weights != "working"
        or workload.lora is not None
    ):
        return 0.0
    found = _beyond(rank, hold.weight) * (1 - rank.offloaded("params"))
    if not rank.sharded and workload.layout.shards > 1:
        return found  # under ``zero`` 1 and 2 states are ranges of flat buckets
    count = states_per_element(workload.recipe.optimizer) + (workload.recipe.ema > 0)
    states = count * _beyond(rank, hold.moments / count) if count else 0.0
    if hold.master:
        states += _beyond(rank, hold.master)
    return found + states * (1 - rank.offloaded("optimizer"))


def _beyond(rank: RankInventory, width: float) -> float:
    """Bytes lost with one tensor of ``width`` bytes per element for each parameter, or for this rank's shard of it."""
    layout, model = rank.workload.layout, rank.workload.model
    here = rank_parameters(layout, model, rank.workload.cut_by, rank.number)
    groups = rank.workload.groups if rank.sharded else {}
    ranks = groups[DENSE].sharded.size if groups else 1
    blocks = (here.dense, here.dense_block), (here.sparse, here.sparse_block)
    ends = ((1, one) for one in (here.embedding, here.norm, here.head))
    found = sum(times * _of_component(one, ranks, width) for times, one in (*blocks, *ends) if times)
    if here.sparse:
        ranks = groups[EXPERTS].sharded.size if groups else 1
        found += here.sparse * _of_component(expert_stack(model, layout.tp, layout.ep), ranks, width)
    return found


@lru_cache(maxsize=4096)
def _of_component(component: Component, ranks: int, width: float) -> float:
    sizes = [width * padded_size(tensor, ranks) / ranks for tensor in component.tensors]
    return sum(allocated_size(size) - size for size in sizes)
