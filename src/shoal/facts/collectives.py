"""Canonical names of collectives, for any spelling by torch, NCCL or gloo."""

from __future__ import annotations

# Substrings of names, longer ones first: a reduce-scatter is neither a reduce nor a scatter.
_SPELLINGS = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "reduce": "reduce",
    "gather": "gather",
    "send": "send",
    "recv": "receive",
}


def collective(name: str) -> str | None:
    """``all_reduce`` for ``allreduce_coalesced``, ``nccl:all_reduce`` or ``ncclDevKernel_AllReduce_Sum_bf16``.

    None if the name is not a collective's.
    """
    letters = "".join(letter for letter in name.lower() if letter.isalpha())
    return next((known for spelling, known in _SPELLINGS.items() if spelling in letters), None)
