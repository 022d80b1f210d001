"""Model FLOPs: the single convention behind every rate that Shoal reports.

Counts the multiplications and additions of the matrix products that the mathematics needs: per weight and token, two
forward and four backward. Causal attention is counted once (half of the square, and only as far as a window reaches).
Not counted: the input embedding, which is a lookup; norms and activations; whatever a layout recomputes.
``CONVENTIONS`` has others: a rate in one of them is a rate here times the ratio of the two counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from shoal.facts.model import Model
from shoal.facts.model.parameters import active_parameter_count, llama_parameters


def flops_per_token(model: Model, seq: int) -> float:
    """FLOPs of a training step per token, in sequences of ``seq`` tokens."""
    return 6 * matrix_parameters(model) + 3 * sum(
        attention_flops(model, layer, seq) for layer in range(model.layers)
    )


@lru_cache(maxsize=32)
def matrix_parameters(model: Model) -> int:
    """Weights that multiply a token; of the routed experts, only the active ones."""
    total = model.vocab * model.hidden if model.tied else 0
    routed = 0
    for parameter in llama_parameters(model):  # experts come stacked: a giant has 40,000 matrices of them
        if parameter.kind == "expert":
            routed += parameter.size
        elif len(parameter.shape) == 2 and parameter.kind not in ("embedding", "position"):
            total += parameter.size
    return total + (routed * model.experts.active // model.experts.count if model.experts else 0)


@lru_cache(maxsize=1024)
def attention_kinds(model: Model, seq: int) -> list[tuple[int, bool, float]]:
    """The kinds of attention layers: one layer of each, whether a window cuts its rows short, and its share of all
    layers.
    """
    windows = [(model.layer_window(layer) or seq) < seq for layer in range(model.layers)]
    return [
        (windows.index(cut), cut, windows.count(cut) / model.layers)
        for cut in (False, True)
        if cut in windows
    ]


def attention_flops(model: Model, layer: int, seq: int) -> float:
    """Forward FLOPs per token of one layer's scores and weighted values, averaged over the sequence."""
    reach = min(model.layer_window(layer) or seq, seq)
    # The first ``reach`` tokens see 1, 2, … reach positions; all later ones see ``reach``.
    seen = (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq
    return 2 * seen * model.heads * _attention_width(model)


def _attention_width(model: Model) -> int:
    """Width of a head's query-key product plus that of its values."""
    if model.latent is not None:
        return model.latent.nope_dim + model.latent.rope_dim + model.latent.value_dim
    return 2 * model.head_dim


# How others count FLOPs per token, forward and backward. Full attention ignores that the mask removes half of the
# square (PaLM's MFU, Megatron-LM, torchtitan, nanoGPT). 6N is the rule of thumb: six per trained parameter, embedding
# included, attention ignored.
CONVENTIONS: dict[str, Callable[[Model, int], float]] = {
    "causal attention once": lambda model, seq: flops_per_token(model, seq),
    "full attention": lambda model, seq: (
        6 * matrix_parameters(model)
        + 3 * sum(_whole_square(model, layer, seq) for layer in range(model.layers))
    ),
    "6N": lambda model, seq: 6.0 * active_parameter_count(model),
}


def in_conventions(model: Model, seq: int, rate: float) -> dict[str, float]:
    """Convert a rate counted here to each of the other conventions."""
    own = flops_per_token(model, seq)
    return {name: rate * count(model, seq) / own for name, count in CONVENTIONS.items()}


def _whole_square(model: Model, layer: int, seq: int) -> float:
    """Forward FLOPs per token of a layer's attention, ignoring the causal mask; a window still limits it."""
    reach = min(model.layer_window(layer) or seq, seq)
    return 2 * reach * model.heads * _attention_width(model)
