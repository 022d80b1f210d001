"""Model FLOPs: the one convention that every rate in Shoal is counted in.

Counted are the multiplications and additions of the matrix products that the mathematics needs, forward and
backward: two a weight and token forward, four backward. Causal attention is counted once (half of the square, and
only as far as a window reaches). Not counted: the input embedding, which is a lookup; norms and activations;
whatever a layout computes again.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.model import Model
from shoal.facts.parameters import parameters


def flops_per_token(model: Model, seq: int) -> float:
    """FLOPs of one token's share of a training step, in sequences of ``seq`` tokens."""
    return 6 * matrix_parameters(model) + 3 * sum(
        attention_flops(model, layer, seq) for layer in range(model.layers)
    )


@lru_cache(maxsize=32)  # a giant has 40,000 expert tensors, and a planner asks for every layout
def matrix_parameters(model: Model) -> int:
    """Weights that one token is multiplied with: of the routed experts, those it is sent to."""
    total = model.vocab * model.hidden if model.tied else 0
    routed = 0
    for parameter in parameters(model):
        if len(parameter.shape) != 2 or parameter.kind in ("embedding", "position"):
            continue
        if parameter.kind == "expert":
            routed += parameter.size
        else:
            total += parameter.size
    return total + (routed * model.experts.active // model.experts.count if model.experts else 0)


def attention_flops(model: Model, layer: int, seq: int) -> float:
    """Forward FLOPs a token of scores and weighted values in one layer, averaged over the sequence."""
    reach = min(model.layer_window(layer) or seq, seq)
    # The first ``reach`` tokens see 1, 2, … reach positions; all later ones see ``reach``.
    seen = (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq
    if model.latent is not None:
        width = model.latent.nope_dim + model.latent.rope_dim + model.latent.value_dim
    else:
        width = 2 * model.head_dim
    return 2 * seen * model.heads * width
