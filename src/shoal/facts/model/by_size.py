"""A model specified only by size: ``10B`` is a decoder of the usual modern shape with about that many parameters.

Llama's proportions: heads of 128 (64 below a billion parameters), grouped queries, a gated MLP 3.5 times as wide as
the stream, and about 128 of width per layer. Widths are multiples that eight tensor ranks can split (four, for small
models), and layers come in steps of two, so that stages can be equal.
"""

from __future__ import annotations

import re

from shoal.facts.model import Model

_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*([mbt])", re.IGNORECASE)
_UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}
SMALLEST, LARGEST = 10**6, 2 * 10**12
# Width per layer, as in published models between 1B and 405B parameters.
WIDTH_A_LAYER = 128
WIDEST = 1 << 16
POSITIONS = 131072


def read_size(text: str) -> int | None:
    """The parameter count that ``7B``, ``350M`` or ``1.5t`` denotes; None for anything else."""
    found = _SIZE.fullmatch(text.strip())
    size = round(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    return size if SMALLEST <= size <= LARGEST else None


def of_size(text: str) -> Model | None:
    """The shape nearest to a size; None if the text is not a size."""
    size = read_size(text)
    if size is None:
        return None
    shapes = (_shaped(text, width, size) for width in _widths(size))
    return min(
        (shape for shape in shapes if shape is not None),
        key=lambda shape: (
            abs(_parameters(shape) / size - 1) + 0.1 * abs(shape.hidden / shape.layers / WIDTH_A_LAYER - 1)
        ),
        default=None,
    )


def _widths(size: int) -> range:
    head = _head(size)
    step = 8 * head if size >= 10**9 else 4 * head
    return range(step, WIDEST + 1, step)


def _head(size: int) -> int:
    return 128 if size >= 10**9 else 64 if size >= 10**8 else 32


def _shaped(name: str, hidden: int, size: int) -> Model | None:
    """With the number of layers that brings this width nearest to the size; None if that is too few or too many."""
    vocab = 128256 if size >= 3 * 10**9 else 32000 if size >= 10**8 else 8192
    heads = hidden // _head(size)
    kv_heads = 8 if heads % 8 == 0 and heads >= 16 else heads
    ffn = round(3.5 * hidden / 256) * 256 or 256
    one = Model(
        name=name.strip().upper(),
        family="llama",
        layers=2,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head(size),
        ffn=ffn,
        vocab=vocab,
        max_positions=POSITIONS,
        tied=size < 3 * 10**9,
    )
    ends = _parameters(one) - 2 * _layer(one)
    step = 2 if size >= 10**8 else 1
    layers = max(2, step * round((size - ends) / _layer(one) / step))
    if not 0.4 <= hidden / layers / WIDTH_A_LAYER <= 2.5:
        return None
    return one.model_copy(update={"layers": layers})


def _layer(model: Model) -> int:
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.hidden * (2 * query + 2 * key + 3 * model.ffn + 2)


def _parameters(model: Model) -> int:
    ends = model.vocab * model.hidden * (1 if model.tied else 2) + model.hidden
    return ends + model.layers * _layer(model)
