"""Control traffic of every step: two all-reduces of two 8-byte numbers over all ranks.

Before the step: how many targets it has, and whether a rank was asked to stop. After the backward pass: the losses and
the squares of the gradients. Clipping and the check for non-finite gradients read that norm and send nothing.
"""

from __future__ import annotations

from shoal.predict.call import Call
from shoal.predict.question import Question


def calls(question: Question) -> tuple[Call, ...]:
    return (Call("all_reduce", "control", 16, 2, "control"),) if question.layout.world > 1 else ()
