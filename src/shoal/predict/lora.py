"""Low-rank additions: how much of what a rank holds is then trained, and so has gradients to sum."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shoal.facts.boxes import ROW
from shoal.predict.held import Component, Held
from shoal.predict.question import Question


class Trained(NamedTuple):
    """Elements on a rank that have gradients, and how many of these are summed beyond the data ranks."""

    elements: int
    tensor_summed: int
    copies_summed: int


def trained(question: Question, here: Held) -> Trained:
    """All of them; with ``lora`` two factors [rank, in] and [out, rank] for each targeted projection.

    Under tensor parallelism the factor on the projection's split side is split with it. The other one is whole on
    every rank, sees some of the features, and so has its gradient summed over the group.
    """
    if question.lora is None:
        return Trained(here.elements, here.tensor_summed, here.copies_summed)
    rank, targets = question.lora.rank, tuple(question.lora.targets)
    dense = adapters(here.dense_block, rank, targets)
    sparse = adapters(here.sparse_block, rank, targets)
    elements, whole = (here.dense * dense[i] + here.sparse * sparse[i] for i in range(2))
    return Trained(elements, whole if question.layout.tp > 1 else 0, 0)


@cache
def adapters(block: Component, rank: int, targets: tuple[str, ...]) -> tuple[int, int]:
    """Elements of a block's low-rank factors on one rank, and of those factors that tensor ranks hold whole."""
    elements = whole = 0
    for tensor in block.tensors:
        module = tensor.name.split(".")[-2]
        if module in targets and len(tensor.shape) == 2:
            outputs, inputs = tensor.shape
            elements += rank * (outputs + inputs)
            whole += rank * (outputs if module in ROW else inputs)
    return elements, whole
