"""Memory of the head and the loss: logits, log-probabilities and gradients of one chunk of tokens."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.bytes_per_parameter import BytesPerParameter
from shoal.facts.cluster.stack import Stack
from shoal.facts.layout.buckets import even_share
from shoal.facts.logits import tokens_at_once
from shoal.facts.model import Model


class Logits(NamedTuple):
    """Bytes for one micro-batch on the rank that computes the loss."""

    peak: float  # logits and everything derived from them, at the peak
    resting: float = 0.0  # saved between forward and backward
    cast: float = 0.0  # saved in addition: the head's weight cast to the compute precision
    # For the head's weight: the cast used in the product, if it is not saved; one chunk's gradient product; the
    # accumulator that chunks' products are added to; and the gradient as it waits for the backward pass.
    copy: float = 0.0
    product: float = 0.0
    added: float = 0.0
    waiting: float = 0.0
    # Whether all of this happens in the backward pass, which recomputes the logits (``facts/losses.py``): until then
    # only the head's input is saved.
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
    """``gathered``: the head's weight already exists in the compute precision. ``handed_on``: bytes per gradient."""
    rows = even_share(model.vocab, tp)
    matrix = rows * model.hidden
    copy = matrix * hold.compute if hold.cast and not gathered else 0.0
    if stack.loss == "fused":
        here = min(tokens, stack.loss_tokens or tokens_at_once(rows))
        return Logits(
            # Per token, as losses are summed: the largest logit, the sum, the target's logit, ln Σ exp, the loss, the
            # loss or 0, and whether it counts.
            peak=(hold.compute * rows + 6 * hold.wide + 1) * here,
            # The gradients of the hidden states; if ``later``, the hidden states and ln Σ exp per token.
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
    # Split over ranks, torch's own loss gradient has one more tensor of the logits' size.
    width = (4.0 if tp > 1 else 3.0) * hold.wide + also
    return Logits(peak=width * rows * tokens, resting=(hold.wide + also) * rows * tokens, cast=copy)
