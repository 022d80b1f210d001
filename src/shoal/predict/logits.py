"""What the head and the loss hold: logits, their logarithms, their gradients, of the tokens that go through at once."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.groups import even_share
from shoal.facts.holdings import Holdings
from shoal.facts.logits import tokens_at_once
from shoal.facts.model import Model
from shoal.facts.stack import Stack


class Loss(NamedTuple):
    """Bytes on the rank that computes the loss, for one micro-batch."""

    peak: float  # logits and what is made of them at the fullest moment of the backward pass
    resting: float  # kept between the passes
    cast: float  # kept beside them: the head's weight in the compute precision
    weight: float  # at the fullest moment: that weight, where it is not kept, and its gradient on the way
    hidden: float  # gradients of the hidden states that have been computed ahead, with the loss
    # As the head's backward pass computes its products: the gradients of the logits and of the hidden states; that of
    # the weight; and that again as it is added up, where that is wider.
    given: float = 0.0
    product: float = 0.0
    added: float = 0.0
    adding: float = 0.0  # of ``weight``, what the gradients of several pieces add up to
    forward: float = 0.0  # as ``peak``, of the forward pass where that is fuller
    entering: float = 0.0  # of ``given``, the hidden states'


def loss(model: Model, tokens: int, tp: int, hold: Holdings, gathered: bool, stack: Stack) -> Loss:
    """``gathered``: the head's weight is there in the compute precision anyway."""
    rows = even_share(model.vocab, tp)
    matrix = rows * model.hidden
    at_once = stack.loss_tokens or tokens_at_once(rows)
    copy = matrix * hold.compute if hold.cast and not gathered else 0.0
    if stack.loss == "fused":
        # Logits and their gradients, as the products take and give them; the weight's gradient adds up beside.
        width = 2.0 * hold.compute
        ahead = tokens * model.hidden * hold.compute
        return Loss(width * rows * min(tokens, at_once), 0.0, 0.0, copy + matrix * hold.compute, ahead)
    also = hold.compute if stack.keeps_logits else 0
    if stack.loss == "compiled":
        return Loss(2 * hold.compute * rows * tokens, hold.compute * rows * tokens, copy, 0.0, 0.0)
    if stack.loss == "full":
        # Split over ranks, torch's own gradient of the loss has one more tensor of the size of the logits.
        width = (4.0 if tp > 1 else 3.0) * hold.wide + also
        return Loss(width * rows * tokens, (hold.wide + also) * rows * tokens, copy, 0.0, 0.0)
    here = min(tokens, at_once)
    # Logarithms of the probabilities, their gradients, the logits' gradients. Split over ranks: the logits, made into
    # their gradients in place, and their exponentials; but in the forward pass logits, their distance from the largest
    # and its exponential.
    width = 3.0 * hold.wide * rows
    forward = 0.0
    if tp > 1:
        # Of each token: its target's row and whether that is here; the largest logit, the sum, the target's.
        forward = (width + 9 + 3 * hold.wide) * here
        width = 2.0 * hold.wide * rows
    entering = hold.compute * model.hidden * here
    given = hold.compute * rows * here + entering
    product, added = hold.compute * matrix, hold.gradient * matrix if hold.cast and not gathered else 0.0
    if tokens <= at_once:
        return Loss(
            width * here,
            hold.wide * rows * tokens,
            copy,
            0.0,
            0.0,
            given,
            product,
            added,
            0.0,
            forward,
            entering,
        )
    # The gradients of the pieces before: of the weight, adding up, and of the hidden states.
    weight = matrix * (hold.compute if gathered else hold.gradient)
    ahead = hold.compute * model.hidden * (tokens - here)
    # Autograd adds the first two gradients up in a third tensor where they are views, as products give them. Where they
    # are cast, that is made before the product goes, and after the weight as it was multiplied.
    added = weight - copy if hold.cast and not gathered else 2 * weight - product
    return Loss(
        width * here, 0.0, 0.0, copy + weight, ahead, given, product, added, weight, forward, entering
    )
