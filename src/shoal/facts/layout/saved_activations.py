"""The activations that a compiled block saves for its backward pass, tensor by tensor, per micro-batch.

The engine's checkpoint policy (``parallel/compile.py``) enforces this list, the memory ledger sums it, and
``tests/parallel/test_compile.py`` compares it with what compiled blocks really save. It excludes weights and what
all layers share: rotary tables, positions, document boundaries, dropout keys.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.layout import Recompute
from shoal.facts.layout.buckets import even_share
from shoal.facts.model import Model

# Bytes of the log-sum-exp that fused attention saves per query and head, unless it computes in fp64.
LOG_SUM_BYTES = 4

INPUT = "block input"
GATHERED = "all tokens' norms, for attention", "all tokens' norms, for the MLP"
PROJECTED = "projected queries", "projected keys"
QUERIES, KEYS, VALUES = "queries", "keys", "values"
ATTENDED, LOG_SUM = "attention result", "ln Σ exp"
OUT = "o_proj result"
GATE, UP = "gate", "up"
DOWN = "down_proj result"


class KeptTensor(NamedTuple):
    place: str
    bytes: int  # per token
    of_stream: bool = False  # part of the residual stream: with sequence parallelism, 1/tp of the tokens


def kept_tensors(
    model: Model, kind: Recompute, compute: int, tp: int = 1, sp: bool = False
) -> tuple[KeptTensor, ...]:
    """What a dense block saves, for one rank's share of heads and features. ``compute``: bytes per value."""
    stream = KeptTensor(INPUT, compute * model.hidden, of_stream=True)
    if kind == "full":
        return (stream,)
    heads, shared = even_share(model.heads, tp), even_share(model.kv_heads, tp)
    query, key = compute * heads * model.head_dim, compute * shared * model.head_dim
    found = [stream]
    if sp and tp > 1:
        found += [KeptTensor(place, compute * model.hidden) for place in GATHERED]
    if model.qk_norm and model.positions == "rotary":
        # The norm's backward pass reads the projections' results; attention's reads what the norm made of them.
        found += [KeptTensor(place, size) for place, size in zip(PROJECTED, (query, key), strict=True)]
    found += [KeptTensor(QUERIES, query), KeptTensor(KEYS, key), KeptTensor(VALUES, key)]
    if kind == "none":
        found += [
            KeptTensor(ATTENDED, query),
            KeptTensor(LOG_SUM, max(LOG_SUM_BYTES, compute // 8 * 8) * heads),
        ]
    if not model.parallel_residual:
        # The input of the second norm, minus the block's input. With parallel residuals both norms read the block's
        # input.
        found.append(KeptTensor(OUT, compute * model.hidden, of_stream=True))
    inner = compute * even_share(model.ffn, tp)
    found += [KeptTensor(place, inner) for place in ((GATE, UP) if model.gated else (UP,))]
    if model.output_norms:
        # The input of the norm behind the MLP; the norm behind attention reads a tensor that is already saved.
        found.append(KeptTensor(DOWN, compute * model.hidden, of_stream=True))
    return tuple(found)
