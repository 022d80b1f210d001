"""The small sums that every step has, over all ranks: two messages of two 8-byte numbers.

Before the step, how many targets it has and whether anybody asks to stop; after the backward pass, the losses and the
squares of the gradients. Clipping and the check for gradients that are not finite read that one norm and send nothing.
"""

from __future__ import annotations

from shoal.predict.call import Call
from shoal.predict.question import Question


def calls(question: Question) -> tuple[Call, ...]:
    return (Call("all_reduce", "control", 16, 2, "control"),) if question.layout.world > 1 else ()
