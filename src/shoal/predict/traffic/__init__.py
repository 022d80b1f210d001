"""What one rank communicates in a step, composed from each strategy's traffic.

``calls`` is for planning: cheap, and approximate in the number of buckets. ``traffic`` matches, to the byte and to the
call, what a rank of the running engine is counted to issue.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.facts.layout.parameter_groups import DENSE
from shoal.facts.layout.ranks import AXES, coordinates, line, stride
from shoal.facts.model.parameters import EMBEDDING
from shoal.facts.traffic import Traffic, show_ranks
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import (
    RankParameters,
    named_factors,
    named_tensors,
    rank_parameters,
)
from shoal.predict.rank_parameters import trained as trained_parameters
from shoal.predict.traffic import context, control, expert, float8, pipeline, replicate, shard, tensor, update
from shoal.predict.workload import Workload


def calls(workload: Workload, stage: int = 0) -> tuple[CollectiveCall, ...]:
    """The collectives of pipeline rank ``stage`` in a step, over all its chunks, with identical calls merged."""
    here = rank_parameters(workload.layout, workload.model, workload.cut_by, stage)
    return (
        *replicate.calls(workload, here),
        *shard.calls(workload, here),
        *expert.states(workload, here),
        *_exchanges(workload, here),
        *_even_sums(workload, here),
        *update.calls(workload, here),
    )


def _exchanges(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    """Traffic that needs no list of tensors."""
    return (
        *tensor.calls(workload, here),
        *context.calls(workload, here),
        *expert.tokens(workload, here),
        *pipeline.calls(workload, here),
        *float8.calls(workload, here),
        *control.calls(workload),
    )


def _even_sums(workload: Workload, here: RankParameters) -> list[CollectiveCall]:
    """Reductions over non-data ranks; where states are sharded, each rank reduces an even share."""
    ranks = workload.groups[DENSE].sharded.size
    _, over_tensor, over_copies = trained_parameters(workload, here)
    found = tensor.shared(workload, over_tensor // ranks or None, over_copies // ranks or None)
    if here.end and workload.lora is None:
        table = (here.embedding if here.first else here.head).tensors[0]
        found += pipeline.ends(workload, table.size // ranks)
    return found


def traffic(workload: Workload, rank: int | None = None) -> list[Traffic]:
    """One rank's collectives of a step, sorted by operation and group, in the form of ``CollectiveCounter``.

    Without ``rank``: the pipeline rank that moves the most bytes, and there the first rank, which has the largest part
    of the vocabulary.
    """
    layout = workload.layout
    if rank is None:
        rank = busiest_stage(workload) * stride("pp", layout)
    return merged(_exact(workload, rank), workload, rank)


def busiest_stage(workload: Workload) -> int:
    """The pipeline rank that moves the most bytes in a step; the first one on a tie."""
    moved = [
        sum(call.bytes * call.count for call in calls(workload, stage)) for stage in range(workload.layout.pp)
    ]
    return moved.index(max(moved))


def _exact(workload: Workload, rank: int) -> list[CollectiveCall]:
    layout, model = workload.layout, workload.model
    place = coordinates(rank, layout)
    here = rank_parameters(layout, model, workload.cut_by, place["pp"], place["tp"])
    stages = [named_tensors(here, model, stage) for stage in here.stages]
    trained = stages
    if workload.lora is not None:
        trained = [named_factors(workload, stage, place["tp"]) for stage in here.stages]
    mine = shard.owned(workload, trained, place["fsdp"] * layout.cp + place["cp"])
    sums = {kind: [size for one, size in mine if one.summed == kind] for kind in ("tensor", "copies")}
    copies = [size for one, size in mine if one.name == EMBEDDING] if here.end else []
    return [
        *replicate.exact(workload, trained),
        *shard.exact(workload, here, stages, trained),
        *expert.exact_states(workload, here),
        *_exchanges(workload, here),
        *tensor.shared(workload, *(sum(sizes) if sizes else None for sizes in sums.values())),
        *pipeline.ends(workload, sum(copies) if copies else None),
        *update.exact(workload, rank),
    ]


def merged(found: Iterable[CollectiveCall], workload: Workload, rank: int) -> list[Traffic]:
    """Calls summed by operation and group, with the group names that a running rank uses."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for call in found:
        if call.count:
            key = call.op, shown(call.group, workload, rank)
            count, total = sums.get(key, (0, 0))
            sums[key] = count + call.count, total + call.count * call.bytes
    return sorted(Traffic(*key, *totals) for key, totals in sums.items())


def shown(group: str, workload: Workload, rank: int) -> str:
    """A group as the counter shows it: by its axis or, if it is not one, by its ranks."""
    layout, model = workload.layout, workload.model
    if group in ("control", "everyone"):
        return _all_ranks(workload, between_hosts=group == "control")
    if group == "pp":
        return show_ranks(line(rank, "pp", layout))
    if group == "pp ends":
        along = line(rank, "pp", layout)
        return show_ranks([along[0], along[-1]])
    if group == "tp copies":
        along, sharing = line(rank, "tp", layout), layout.tp // model.kv_heads
        first = coordinates(rank, layout)["tp"] // sharing * sharing
        return show_ranks(along[first : first + sharing])
    return group


def _all_ranks(workload: Workload, between_hosts: bool) -> str:
    """The name of the group of all ranks, which is that of the axis if there is only one; hosts of GPUs have a group
    of their own.
    """
    axes = [axis for axis in AXES if getattr(workload.layout, axis) > 1]
    apart = between_hosts and workload.cluster.device.name != "cpu"
    return axes[0] if len(axes) == 1 and not apart else "world"
