"""Traffic of fp8 products: after an update, the largest values of weights that several ranks share.

Reduced over ranks that hold other rows (``zero=3``), then over tensor ranks. The weights themselves, all-gathered in
fp8, are in ``shard``'s traffic; activations are exchanged in bf16.
"""

from __future__ import annotations

from shoal.facts.layout.float8 import SCALE_BYTES, scale_slots
from shoal.facts.layout.parameter_groups import DENSE
from shoal.facts.model.parameters import block_parameters
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.workload import Workload


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    recipe, tp, group = workload.recipe, workload.layout.tp, workload.groups[DENSE]
    if recipe.precision != "fp8":
        return ()
    room = {True: 0, False: 0}
    split = {one.name: one.split for one in block_parameters(workload.model, with_experts=False)}
    for tensor in here.dense_block.tensors:
        if len(tensor.shape) == 2:
            by_input = tp > 1 and split[tensor.name] == "row"
            for slot in scale_slots(recipe.fp8, *tensor.shape, by_input):
                room[slot.over_tp] += here.dense * slot.room
    found = []
    for over_tp, values in room.items():
        size = values * SCALE_BYTES
        if size and group.fully_sharded:
            found.append(CollectiveCall("all_reduce", group.sharded.name, size, 1, "update"))
        if size and over_tp and tp > 1:
            found.append(CollectiveCall("all_reduce", "tp", size, 1, "update"))
    return tuple(found)
