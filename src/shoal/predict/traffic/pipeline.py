"""Traffic of a pipeline (``pp``): hidden states down, their gradients up, and a tied embedding's gradients.

A link is a cut between a stage of this rank and a neighbouring stage on another rank. For every link and micro-batch:

    send and receive  tokens of a micro-batch (1/tp of them with ``sp``) · hidden · compute width: one each way

Once per step, if a tied embedding has a copy at each end: all-reduce over the two ends, its elements · reduce width.
In a V-shaped schedule both ends are on one rank, and nothing is sent.
"""

from __future__ import annotations

from shoal.facts.precision import compute_width, reduce_width
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.workload import Workload


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    if not here.links:
        return ()
    size, count = message_bytes(workload), workload.accumulation * here.links
    return tuple(CollectiveCall(op, "pp", size, count, "message") for op in ("send", "receive"))


def message_bytes(workload: Workload) -> int:
    """Bytes of one message between stages."""
    layout = workload.layout
    tokens = workload.tokens // layout.tp if layout.sp else workload.tokens
    return tokens * workload.model.hidden * compute_width(workload.recipe)


def ends(workload: Workload, elements: int | None) -> list[CollectiveCall]:
    """The reduction of a tied embedding's two gradients; nothing if this rank has neither copy, or both."""
    if elements is None:
        return []
    return [CollectiveCall("all_reduce", "pp ends", elements * reduce_width(workload.recipe), 1, "gradients")]
