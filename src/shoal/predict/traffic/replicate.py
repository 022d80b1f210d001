"""Traffic of data parallelism (``dp``): every gradient once per step, in buckets.

all-reduce over ``dp``, a bucket: its elements · reduce width
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.facts.layout.buckets import even_share
from shoal.facts.layout.parameter_groups import DENSE
from shoal.facts.precision import gradient_width, reduce_width
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import RankParameters, RankTensor, bucket_count, bucket_names, trained
from shoal.predict.workload import Workload


def applies(workload: Workload) -> bool:
    group = workload.groups[DENSE]
    return group.replicated.size > 1 and group.sharded.size == 1


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    """Close and cheap: all bytes, in about as many buckets as there are."""
    if not applies(workload):
        return ()
    elements, count = even_buckets(workload, here, by_kind=False)
    return (
        CollectiveCall(
            "all_reduce", "dp", elements * reduce_width(workload.recipe) // count, count, "gradients"
        ),
    )


def exact(workload: Workload, stages: Sequence[Sequence[RankTensor]]) -> list[CollectiveCall]:
    """Bucket by bucket, of each of a rank's stages."""
    if not applies(workload):
        return []
    width, found = reduce_width(workload.recipe), []
    for tensors in stages:
        sizes = {tensor.label: tensor.size for tensor in tensors}
        for labels in bucket_names(
            tensors, gradient_width(workload.recipe), bucket_bytes(workload), by_kind=False
        ):
            found.append(
                CollectiveCall(
                    "all_reduce", "dp", sum(sizes[label] for label in labels) * width, 1, "gradients"
                )
            )
    return found


def bucket_bytes(workload: Workload) -> int:
    return round(workload.tune.bucket_mb * 2**20)


def even_buckets(workload: Workload, here: RankParameters, by_kind: bool) -> tuple[int, int]:
    """All elements that have gradients, and about how many buckets they fill."""
    elements, width = trained(workload, here).elements, gradient_width(workload.recipe)
    if workload.lora is not None:  # many small tensors, which fill their buckets
        return elements, even_share(elements * width, bucket_bytes(workload))
    return elements, bucket_count(here, width, bucket_bytes(workload), by_kind)
