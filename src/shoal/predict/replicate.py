"""Traffic of data parallelism (``dp``): every gradient once per step, in buckets.

all-reduce over ``dp``, a bucket: its elements · reduce width
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.facts.groups import even_share
from shoal.facts.parameter_groups import DENSE
from shoal.facts.precision import gradient_width, reduce_width
from shoal.predict.call import Call
from shoal.predict.question import Question
from shoal.predict.rank_parameters import RankParameters, Tensor, bucket_count, bucket_names, trained


def applies(question: Question) -> bool:
    group = question.groups[DENSE]
    return group.replicated.size > 1 and group.sharded.size == 1


def calls(question: Question, here: RankParameters) -> tuple[Call, ...]:
    """Close and cheap: all bytes, in about as many buckets as there are."""
    if not applies(question):
        return ()
    elements, count = even_buckets(question, here, by_kind=False)
    return (Call("all_reduce", "dp", elements * reduce_width(question.recipe) // count, count, "gradients"),)


def exact(question: Question, stages: Sequence[Sequence[Tensor]]) -> list[Call]:
    """Bucket by bucket, of each of a rank's stages."""
    if not applies(question):
        return []
    width, found = reduce_width(question.recipe), []
    for tensors in stages:
        sizes = {tensor.label: tensor.size for tensor in tensors}
        for labels in bucket_names(
            tensors, gradient_width(question.recipe), bucket_bytes(question), by_kind=False
        ):
            found.append(
                Call("all_reduce", "dp", sum(sizes[label] for label in labels) * width, 1, "gradients")
            )
    return found


def bucket_bytes(question: Question) -> int:
    return round(question.tune.bucket_mb * 2**20)


def even_buckets(question: Question, here: RankParameters, by_kind: bool) -> tuple[int, int]:
    """All elements that have gradients, and about how many buckets they fill."""
    elements, width = trained(question, here).elements, gradient_width(question.recipe)
    if question.lora is not None:  # many small tensors, which fill their buckets
        return elements, even_share(elements * width, bucket_bytes(question))
    return elements, bucket_count(here, width, bucket_bytes(question), by_kind)
