"""Layout complexity: the parts that a user has to understand, tune and debug.

Plain replicas have none. Every other axis is a part, and so are replicas beside it and every non-default policy: a
schedule, chunks, units, a ZeRO stage, an explicit micro-batch, recomputation, each offload. Departures from published
practice count as one more thing to explain (``plan/practice.py``).
"""

from __future__ import annotations

from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import Stack
from shoal.facts.layout import DEFAULT_CHUNKS, DEGREES, Layout
from shoal.facts.model import Model
from shoal.plan import practice
from shoal.plan.space import (
    Candidate,
    ModelSplit,
    PipelineOrder,
    RankWork,
    StateSharding,
    layout_of,
    placed,
)
from shoal.predict.workload import Workload


def parts(workload: Workload) -> list[str]:
    """The parts by key, in the order in which a layout is printed."""
    written = plain(workload.layout, workload.recipe.batch).written()
    if not any(axis in written for axis in DEGREES if axis != "dp"):
        written.pop("dp", None)
    offload = written.pop("offload", ())
    usual = practice.usual_zero(workload.stack)
    if workload.layout.shards > 1 and usual != 3:
        # Another stack has another default stage, so there the unwritten one may be the part.
        written.pop("zero", None)
        if workload.layout.zero != usual:
            written["zero"] = workload.layout.zero
    return [*written, *(f"offload={part}" for part in offload), *practice.departures(workload)]


def plain(layout: Layout, batch: int) -> Layout:
    """The layout without a micro-batch that equals the default."""
    if layout.micro is None:
        return layout
    bare = layout.replace(micro=None)
    return bare if bare.micro_batch(batch) == layout.micro else layout


# The same count for partly decided layouts. Decisions only add to it, so the sum over the decisions made is a lower
# bound, and over all of them it is the number of parts.


def of_split(split: ModelSplit, model: Model, cluster: Cluster, seq: int) -> int:
    """A lower bound: whether data ranks replicate or shard is still open."""
    axes = (split.tp > 1) + (split.cp > 1) + (split.pp > 1)
    departs = practice.of_split(split, model, cluster, seq)
    return axes + (axes > 0 and split.data > 1) + departs


def of_share(split: ModelSplit, share: RankWork, model: Model, cluster: Cluster) -> int:
    policies = (not share.sp) + (share.cp_kind != "ring") + (share.ep > 1)
    return policies + practice.of_share(split, share, model, cluster)


def of_order(split: ModelSplit, share: RankWork, order: PipelineOrder, batch: int) -> int:
    """Including the micro-batch, whose default depends on the schedule."""
    chunks = order.chunks != DEFAULT_CHUNKS.get(order.schedule, 1)
    policies = (order.schedule != "1f1b") + chunks + (order.recompute != "none")
    return policies + (share.micro != usual_micro(split, order, batch)) + practice.of_order(split, order)


def of_states(split: ModelSplit, share: RankWork, states: StateSharding, stack: Stack) -> int:
    sharded = states.fsdp > 1
    both = sharded and states.dp > 1
    # Data ranks beside another axis are counted with the split; expert ranks are an axis of a kind.
    alone = split.tp == split.cp == split.pp == 1
    first = alone and (sharded or (share.ep > 1 and states.dp > 1))
    unusual = placed(split, states).sharded.size > 1 and states.zero != practice.usual_zero(stack)
    return both + first + unusual + len(states.offload)


def replicas_alone(split: ModelSplit, share: RankWork, states: StateSharding) -> int:
    """1 if ``dp`` is the only axis, and hence not a part."""
    return int(states.dp > 1 and states.fsdp == split.tp == split.cp == split.pp == share.ep == 1)


def of_unit(unit: int) -> int:
    return int(unit > 1)


def count(candidate: Candidate, asked: Workload) -> int:
    """The number of ``parts``."""
    split, share, order, states, unit = candidate
    decided = of_split(split, asked.model, asked.cluster, asked.recipe.seq)
    decided += of_share(split, share, asked.model, asked.cluster)
    decided += of_order(split, share, order, asked.recipe.batch)
    decided += practice.of_states(split, states, asked.cluster)
    return decided + of_states(split, share, states, asked.stack) + of_unit(unit)


def usual_micro(split: ModelSplit, order: PipelineOrder, batch: int) -> int:
    """The default micro-batch of such a layout."""
    return layout_of(dp=split.data, pp=split.pp, schedule=order.schedule).micro_batch(batch)
