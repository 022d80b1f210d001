"""Memory of the head and the loss: logits, log-probabilities and gradients of one chunk of tokens."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.bytes_per_parameter import BytesPerParameter
from shoal.facts.cluster.stack import Stack
from shoal.facts.layout.buckets import even_share
from shoal.facts.logits import tokens_at_once
from shoal.facts.model import Model


class Logits(NamedTuple):
    """Bytes on the rank that computes the loss, for one micro-batch."""

    peak: float  # logits and what is made of them at the fullest moment of the backward pass
    forward: float = 0.0  # as ``peak``, of the forward pass where that is fuller
    resting: float = 0.0  # kept between the passes
    cast: float = 0.0  # kept beside them: the head's weight in the compute precision
    weight: float = (
        0.0  # at the fullest moment: that weight, where it is not kept, and its gradient on the way
    )
    adding: float = 0.0  # of ``weight``, what the gradients of several pieces add up to
    hidden: float = 0.0  # gradients of the hidden states that have been computed ahead, with the loss
    # As the head's backward pass computes its products: the gradients of the logits and of the hidden states; that of
    # the weight; and that again as it is added up, where that is wider.
    given: float = 0.0
    entering: float = 0.0  # of ``given``, the hidden states'
    product: float = 0.0
    added: float = 0.0


def logits(
    model: Model, *, tokens: int, tp: int, hold: BytesPerParameter, gathered: bool, stack: Stack
) -> Logits:
    """``gathered``: the head's weight is there in the compute precision anyway."""
    rows = even_share(model.vocab, tp)
    matrix = rows * model.hidden
    here = min(tokens, stack.loss_tokens or tokens_at_once(rows))
    casts = hold.cast and not gathered
    copy, product = matrix * hold.compute if casts else 0.0, matrix * hold.compute
    if stack.loss == "fused":
        # Logits and their gradients, as the products take and give them; the weight's gradient adds up beside.
        hidden = tokens * model.hidden * hold.compute
        return Logits(peak=2.0 * hold.compute * rows * here, weight=copy + product, hidden=hidden)
    if stack.loss == "compiled":
        kept = hold.compute * rows * tokens
        return Logits(peak=2.0 * kept, resting=kept, cast=copy)
    if stack.loss == "full":
        also = hold.compute if stack.keeps_logits else 0
        # Split over ranks, torch's own gradient of the loss has one more tensor of the size of the logits.
        width = (4.0 if tp > 1 else 3.0) * hold.wide + also
        return Logits(peak=width * rows * tokens, resting=(hold.wide + also) * rows * tokens, cast=copy)
    # Logarithms of the probabilities, their gradients, the logits' gradients. Split over ranks: the logits, made into
    # their gradients in place, and their exponentials; but in the forward pass logits, their distance from the largest
    # and its exponential; and of each token its target's row, whether that is here, the largest logit, the sum, the
    # target's.
    three = 3.0 * hold.wide * rows
    entering = hold.compute * model.hidden * here
    found = Logits(
        peak=(2.0 * hold.wide * rows if tp > 1 else three) * here,
        forward=(three + 9 + 3 * hold.wide) * here if tp > 1 else 0.0,
        given=hold.compute * rows * here + entering,
        entering=entering,
        product=product,
    )
    if here == tokens:
        added = hold.gradient * matrix if casts else 0.0
        return found._replace(resting=hold.wide * rows * tokens, cast=copy, added=added)
    # The gradients of the pieces before: of the weight, adding up, and of the hidden states.
    weight = matrix * (hold.compute if gathered else hold.gradient)
    return found._replace(
        weight=copy + weight,
        adding=weight,
        hidden=hold.compute * model.hidden * (tokens - here),
        # Autograd adds the first two gradients up in a third tensor where they are views, as products give them. Where
        # they are cast, that is made before the product goes, and after the weight as it was multiplied.
        added=weight - copy if casts else 2 * weight - product,
    )
