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

    peak: float  # logits and what is made of them at the fullest moment
    resting: float = 0.0  # kept between the passes
    cast: float = 0.0  # kept beside them: the head's weight in the compute precision
    # Of the head's weight: what it is multiplied as, where that is not kept; the product of one chunk that is its
    # gradient; the sum of several chunks', to which their products are added as they are computed; and the gradient as
    # it waits for the backward pass.
    copy: float = 0.0
    product: float = 0.0
    added: float = 0.0
    waiting: float = 0.0
    # Whether all of that is made in the backward pass, which computes the logits again (``facts/losses.py``): until
    # then nothing waits but the hidden states that the head reads.
    later: bool = False


def logits(
    model: Model,
    *,
    tokens: int,
    tp: int,
    hold: BytesPerParameter,
    handed_on: float,
    gathered: bool,
    stack: Stack,
    later: bool = False,
    trained: bool = True,
) -> Logits:
    """``gathered``: the head's weight is there in the compute precision anyway. ``handed_on``: bytes per gradient."""
    rows = even_share(model.vocab, tp)
    matrix = rows * model.hidden
    copy = matrix * hold.compute if hold.cast and not gathered else 0.0
    if stack.loss == "fused":
        here = min(tokens, stack.loss_tokens or tokens_at_once(rows))
        return Logits(
            # Of each token: the largest logit (twice), the sum, the target's, ln Σ exp, the factor.
            peak=(hold.compute * rows + 6 * hold.wide) * here,
            # The gradients of the hidden states; or these, with ln Σ exp of each token.
            resting=(hold.compute * model.hidden + later * hold.wide) * tokens,
            copy=copy,
            product=0.0 if stack.adds_products and here < tokens else trained * matrix * hold.compute,
            added=trained * matrix * hold.wide if here < tokens else 0.0,
            waiting=trained * matrix * handed_on,
            later=later,
        )
    if stack.loss == "compiled":
        kept = hold.compute * rows * tokens
        return Logits(peak=2.0 * kept, resting=kept, cast=copy)
    also = hold.compute if stack.keeps_logits else 0
    # Split over ranks, torch's own gradient of the loss has one more tensor of the size of the logits.
    width = (4.0 if tp > 1 else 3.0) * hold.wide + also
    return Logits(peak=width * rows * tokens, resting=(hold.wide + also) * rows * tokens, cast=copy)
