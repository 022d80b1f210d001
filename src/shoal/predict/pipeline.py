"""Traffic of a pipeline (``pp``): hidden states down, their gradients up, and a tied embedding's gradients.

A link is a cut between a stage of this rank and its neighbour on another rank. For every link and micro-batch:

    send and receive  tokens of a micro-batch (1/tp of them with ``sp``) · hidden · compute width: one each way

Once a step, where a tied embedding has a copy at each end: all-reduce over the two ends, its elements · reduce width.
In a V both ends are on one rank, and nothing is sent.
"""

from __future__ import annotations

from shoal.facts.precision import compute_width, reduce_width
from shoal.predict.call import Call
from shoal.predict.question import Question
from shoal.predict.rank_parameters import RankParameters


def calls(question: Question, here: RankParameters) -> tuple[Call, ...]:
    if not here.links:
        return ()
    size, count = message_bytes(question), question.accumulation * here.links
    return tuple(Call(op, "pp", size, count, "message") for op in ("send", "receive"))


def message_bytes(question: Question) -> int:
    """Of one message between stages."""
    layout = question.layout
    tokens = question.tokens // layout.tp if layout.sp else question.tokens
    return tokens * question.model.hidden * compute_width(question.recipe)


def ends(question: Question, elements: int | None) -> list[Call]:
    """The sum of both copies' gradients; None where this rank has neither, or both."""
    if elements is None:
        return []
    return [Call("all_reduce", "pp ends", elements * reduce_width(question.recipe), 1, "gradients")]
