"""Traffic of data parallelism (``dp``): every gradient once per step, in buckets.

all-reduce over ``dp``, per bucket: its elements · reduce width
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.facts.layout.buckets import even_share
from shoal.facts.layout.parameter_groups import DENSE, ParameterGroup
from shoal.facts.precision import gradient_width, reduce_width
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import (
    BucketKinds,
    RankParameters,
    RankTensor,
    bucket_count,
    bucket_names,
    trained,
    with_gradients,
)
from shoal.predict.workload import Workload


def applies(workload: Workload) -> bool:
    group = workload.groups[DENSE]
    return group.replicated.size > 1 and group.sharded.size == 1


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    """Cheap approximation: exact total bytes, in about the right number of buckets."""
    if not applies(workload):
        return ()
    elements, count = even_buckets(workload, here, BucketKinds.ANY)
    return tuple(bucket_calls(workload, [(elements // count, count)], workload.groups[DENSE]))


def exact(
    workload: Workload, stages: Sequence[Sequence[RankTensor]], group: ParameterGroup | None = None
) -> list[CollectiveCall]:
    """Exact collectives by bucket, for each stage of a rank. ``group``: the tensors' parameter group, by default the
    dense one.
    """
    if group is None and not applies(workload):
        return []
    filled = []
    for tensors in (with_gradients(workload, one) for one in stages):
        sizes = {tensor.label: tensor.size for tensor in tensors}
        names = bucket_names(
            tensors, gradient_width(workload.recipe), bucket_bytes(workload), BucketKinds.ANY
        )
        filled += [(sum(sizes[label] for label in labels), 1) for labels in names]
    return bucket_calls(workload, filled, group or workload.groups[DENSE])


def bucket_calls(
    workload: Workload, buckets: Iterable[tuple[int, int]], group: ParameterGroup
) -> list[CollectiveCall]:
    """Collectives of ``buckets``, given as (elements, number of such buckets)."""
    copies, width = group.replicated, reduce_width(workload.recipe)
    if copies.size == 1:
        return []
    return [
        CollectiveCall("all_reduce", copies.name, elements * width, count, "gradients")
        for elements, count in buckets
    ]


def bucket_bytes(workload: Workload) -> int:
    return round(workload.tune.bucket_mb * 2**20)


def even_buckets(workload: Workload, here: RankParameters, kinds: BucketKinds) -> tuple[int, int]:
    """Total elements with gradients, and about how many buckets they fill."""
    elements, width = trained(workload, here).elements, gradient_width(workload.recipe)
    if workload.lora is not None:  # many small tensors, which fill their buckets evenly
        return elements, even_share(elements * width, bucket_bytes(workload))
    return elements, bucket_count(here, width, bucket_bytes(workload), kinds)
