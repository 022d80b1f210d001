"""Low-rank additions: how much of what a rank holds is then trained, and so has gradients to sum."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shoal.facts.model import Model
from shoal.facts.parameters import adapters, block_parameters
from shoal.predict.held import Component, Held, component_of, tensor_on
from shoal.predict.question import Question


class Trained(NamedTuple):
    """Elements on a rank that have gradients, and how many of these are summed beyond the data ranks."""

    elements: int
    tensor_summed: int
    copies_summed: int


def trained(question: Question, here: Held) -> Trained:
    """All of them; with ``lora`` the factors beside the targeted projections of every block."""
    if question.lora is None:
        return Trained(here.elements, here.tensor_summed, here.copies_summed)
    layout, rank, targets = question.layout, question.lora.rank, tuple(question.lora.targets)
    found = [
        (count, _factors(question.model, with_experts, rank, targets, layout.tp, layout.sp))
        for count, with_experts in ((here.dense, False), (here.sparse, True))
    ]
    return Trained(
        sum(count * one.elements for count, one in found),
        sum(count * one.tensor_summed for count, one in found),
        sum(count * one.copies_summed for count, one in found),
    )


@cache
def _factors(
    model: Model, with_experts: bool, rank: int, targets: tuple[str, ...], tp: int, sp: bool
) -> Component:
    """Of one block, on a rank of a tensor group."""
    return component_of(
        tensor_on(factor, tp, sp, 0)
        for parameter in block_parameters(model, with_experts)
        for factor in adapters(parameter, rank, targets)
    )
