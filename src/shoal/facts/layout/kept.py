"""What a compiled block keeps of a micro-batch for its backward pass, tensor by tensor.

The engine's checkpoint policy (``parallel/compile.py``) makes this list true, the memory ledger adds it up, and
``tests/parallel/test_compile.py`` holds it against what compiled blocks save. Weights are not in it, nor is what all
layers share: rotary tables, positions, documents, dropout's keys.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.layout import Recompute
from shoal.facts.layout.buckets import even_share
from shoal.facts.model import Model

# Of the logarithm of Σ exp that a fused kernel of attention leaves for each query and head, unless it computes in fp64.
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
    bytes: int  # a token
    of_stream: bool = False  # of the residual stream: with sequence parallelism a rank has 1/tp of its tokens


def kept_tensors(
    model: Model, kind: Recompute, compute: int, tp: int = 1, sp: bool = False
) -> tuple[KeptTensor, ...]:
    """Of a dense block with one rank's share of the heads and features. ``compute``: bytes a value."""
    stream = KeptTensor(INPUT, compute * model.hidden, of_stream=True)
    if kind == "full":
        return (stream,)
    heads, shared = even_share(model.heads, tp), even_share(model.kv_heads, tp)
    query, key = compute * heads * model.head_dim, compute * shared * model.head_dim
    found = [stream]
    if sp and tp > 1:
        found += [KeptTensor(place, compute * model.hidden) for place in GATHERED]
    if model.qk_norm and model.positions == "rotary":
        # The norm's backward pass reads what was projected, attention's what came of it.
        found += [KeptTensor(place, size) for place, size in zip(PROJECTED, (query, key), strict=True)]
    found += [KeptTensor(QUERIES, query), KeptTensor(KEYS, key), KeptTensor(VALUES, key)]
    if kind == "none":
        found += [
            KeptTensor(ATTENDED, query),
            KeptTensor(LOG_SUM, max(LOG_SUM_BYTES, compute // 8 * 8) * heads),
        ]
    if not model.parallel_residual:
        # What the second norm reads, less the block's input. In parallel both norms read that.
        found.append(KeptTensor(OUT, compute * model.hidden, of_stream=True))
    inner = compute * even_share(model.ffn, tp)
    found += [KeptTensor(place, inner) for place in ((GATE, UP) if model.gated else (UP,))]
    if model.output_norms:
        # What the norm behind the MLP reads; the one behind attention reads what is there already.
        found.append(KeptTensor(DOWN, compute * model.hidden, of_stream=True))
    return tuple(found)
