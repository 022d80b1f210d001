"""Every operator of Shoal's network besides matrix products and attention, with the bytes it moves.

The network runs operator by operator, so each reads its inputs from memory and writes its result there. The lists
follow what torch's autograd issues; a test counts the operators of the running network and compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from shoal.facts.logits import tokens_at_once
from shoal.facts.model import Model


class Operator(NamedTuple):
    """Passes over a tensor: reads and writes of all its elements, at the compute width and at the wide one.

    Operators on one number per row, or on a vector, have no passes: they only cost a launch.
    """

    name: str
    narrow: float = 0
    wide: float = 0
    # Present always; if activations are narrower than the precision they are computed in; or if parameters are stored
    # in another precision than activations.
    when: Literal["always", "narrow", "cast"] = "always"


class Widths(NamedTuple):
    """Bytes per element."""

    compute: int  # activations
    states: float  # parameters and their gradients

    @property
    def wide(self) -> int:
        """The precision in which norms, rotations and the loss compute."""
        return max(4, self.compute)

    @property
    def casts(self) -> bool:
        return self.compute != self.states


class OperatorWork(NamedTuple):
    """Operators of one kind, in one direction."""

    part: str  # the name under which a calibration measures it
    bytes: float
    operators: int


_CAST = Operator("to", 1, 1, "narrow")
_VECTOR = Operator("cast bias", when="cast")

# models/norm.py: per normed element.
RMS_FORWARD = (
    _CAST,
    Operator("square", wide=2),
    Operator("mean", wide=1),
    Operator("add epsilon"),
    Operator("rsqrt"),
    Operator("multiply", wide=2),
    Operator("cast weight", when="cast"),
    _CAST,
    Operator("multiply by weight", narrow=2),
)
RMS_BACKWARD = (
    Operator("multiply by weight", narrow=2),
    Operator("multiply for weight", narrow=3),
    Operator("sum for weight", narrow=1),
    _CAST,
    Operator("cast weight's gradient", when="cast"),
    Operator("multiply by input", wide=3),
    Operator("multiply by scale", wide=2),
    Operator("sum of rows", wide=1),
    Operator("multiply rows"),
    Operator("power of rows"),
    Operator("multiply rows"),
    Operator("divide, spread over rows", wide=1),
    Operator("first power", wide=2),
    Operator("double", wide=2),
    Operator("multiply", wide=3),
    Operator("add", wide=3),
    _CAST,
)
LAYER_FORWARD = (
    Operator("cast weight", when="cast"),
    Operator("cast bias", when="cast"),
    Operator("norm", narrow=2),
)
LAYER_BACKWARD = (
    Operator("norm backward", narrow=3),
    Operator("cast weight's gradient", when="cast"),
    Operator("cast bias's gradient", when="cast"),
)
# models/rotary.py: per rotated element. Each half of a head is multiplied by cosine and by sine.
_HALF = Operator("multiply half", narrow=0.5, wide=0.5)
_WIDE_HALF = Operator("multiply half", wide=1)
_NARROW_HALF = Operator("to", 0.5, 0.5, "narrow")
ROTARY_FORWARD = (
    *(_HALF, _HALF, Operator("subtract halves", wide=1.5)),
    *(_HALF, _HALF, Operator("add halves", wide=1.5)),
    *(_NARROW_HALF, _NARROW_HALF),
)
ROTARY_BACKWARD = (
    *(_NARROW_HALF, _NARROW_HALF),
    *(_WIDE_HALF, _NARROW_HALF) * 4,
    Operator("negate half", wide=1),
    Operator("add halves", narrow=1.5),
    Operator("add halves", narrow=1.5),
)
# Per element of whole heads, rotated or not: the parts concatenated; in the backward pass also laid out by token
# again.
JOINED_FORWARD = (Operator("concatenate", narrow=2),)
JOINED_BACKWARD = (Operator("concatenate", narrow=2), Operator("copy", narrow=2))
# models/decoder.py: per element of the MLP's inner width.
GATE_FORWARD = (Operator("activation", narrow=2), Operator("multiply", narrow=3))
GATE_BACKWARD = (
    Operator("multiply", narrow=3),
    Operator("multiply", narrow=3),
    Operator("activation backward", narrow=3),
)
PLAIN_FORWARD = (Operator("activation", narrow=2),)
PLAIN_BACKWARD = (Operator("activation backward", narrow=3),)
# models/logits.py: per logit.
LOSS = (Operator("token statistics", narrow=1), Operator("logits to gradients", narrow=2))
# Both fused into one kernel (``facts/logits.py``).
LOSS_AT_ONCE = (Operator("logits to gradients", narrow=2),)

# models/dropout.py: 8-byte hashes, mixed step by step in a cache that is about twice as fast as memory.
MASK_OPERATORS = 15
MASK_BYTES = MASK_OPERATORS * 16 / 2

WIDE_HEAD = 96

ADD = Operator("add", narrow=3)
COPY = Operator("copy", narrow=2)
SUM = Operator("sum", narrow=1)


def moved(part: str, operators: Iterable[Operator], elements: float, widths: Widths) -> OperatorWork:
    """The work of all these operators over ``elements``."""
    gone = {"narrow": widths.compute == widths.wide, "cast": not widths.casts}
    there = [one for one in operators if not gone.get(one.when)]
    size = sum(one.narrow * widths.compute + one.wide * widths.wide for one in there)
    return OperatorWork(part, size * elements, len(there))


class Tokens(NamedTuple):
    """One rank's tokens of a micro-batch, and its widths of a layer."""

    inside: float  # tokens that its products see
    between: float  # tokens between attention and MLP: a part, with sequence parallelism
    query: int
    key: int
    inner: float  # the MLP's


class BlockOperators(NamedTuple):
    forward: list[OperatorWork]
    backward: list[OperatorWork]
    # What recomputation does not repeat: it stops once the last unsaved tensor is restored, which is before the last
    # product and what follows it.
    last: list[OperatorWork]


def block(model: Model, mine: Tokens, widths: Widths) -> BlockOperators:
    """One layer, one micro-batch; without its matrices, whose casts and sums ``matrices`` counts."""
    tokens, hidden, stream = mine.inside, model.hidden, mine.between * model.hidden
    norm, norm_back = _norm(model, stream, widths)
    norms = 4 if model.output_norms else 2
    forward, backward = [norm] * norms, [norm_back] * norms
    for heads in (tokens * mine.query, tokens * mine.key):
        if model.qk_norm:
            ahead, back = _norm(model, heads, widths, rms=True)
            forward, backward = [*forward, ahead], [*backward, back]
        if model.positions == "rotary":
            ahead, back = rotary(heads, heads * model.rope_fraction, widths, model.head_dim)
            forward, backward = [*forward, ahead], [*backward, back]
    if model.positions == "rotary":
        # Attention's output is laid out by head, like its inputs; the projection reads by token.
        forward.append(moved("copy", [COPY], tokens * mine.query, widths))
    gate = (GATE_FORWARD, GATE_BACKWARD) if model.gated else (PLAIN_FORWARD, PLAIN_BACKWARD)
    forward.append(moved("gate", gate[0], tokens * mine.inner, widths))
    backward.append(moved("gate backward", gate[1], tokens * mine.inner, widths))
    residual = moved("add", [ADD], stream, widths)
    forward += [residual, residual]
    # Gradients of tensors with several readers are summed: the stream by norm and residual sum, queries, keys and
    # values, gate and up.
    backward += [residual, residual]
    backward += [moved("add", [ADD], tokens * hidden, widths)] * (3 if model.gated else 2)
    for elements in biased(model, mine):
        backward.append(moved("sum", [SUM, _VECTOR], elements, widths))
        forward.append(moved("weights", [_VECTOR], 0, widths))
    return BlockOperators(forward, backward, [residual])


def _norm(
    model: Model, elements: float, widths: Widths, rms: bool = False
) -> tuple[OperatorWork, OperatorWork]:
    if rms or model.norm == "rms":
        return (
            moved("norm", RMS_FORWARD, elements, widths),
            moved("norm backward", RMS_BACKWARD, elements, widths),
        )
    return (
        moved("layer norm", LAYER_FORWARD, elements, widths),
        moved("layer norm backward", LAYER_BACKWARD, elements, widths),
    )


def rotary(
    elements: float, turning: float, widths: Widths, head_dim: int
) -> tuple[OperatorWork, OperatorWork]:
    """The halves of a head are apart in memory, and narrow ones are read less efficiently: those are a part of their
    own.
    """
    size = "wide " if head_dim >= WIDE_HEAD else ""
    ways = []
    for part, turned, joined in (
        (f"{size}rotary", ROTARY_FORWARD, JOINED_FORWARD),
        (f"{size}rotary backward", ROTARY_BACKWARD, JOINED_BACKWARD),
    ):
        first, second = moved(part, turned, turning, widths), moved(part, joined, elements, widths)
        ways.append(OperatorWork(part, first.bytes + second.bytes, first.operators + second.operators))
    return ways[0], ways[1]


def biased(model: Model, mine: Tokens) -> list[float]:
    """Elements summed over tokens for the gradients of biases."""
    widths: list[float] = []
    if model.qkv_bias:
        widths += [mine.query, mine.key, mine.key]
    if model.out_bias:
        widths.append(model.hidden)
    if model.mlp_bias:
        widths += [mine.inner] * (2 if model.gated else 1) + [model.hidden]
    return [mine.inside * width for width in widths]


def matrices(count: int, elements: float, each: float) -> list[OperatorWork]:
    """Work of ``count`` matrices with ``elements`` in total, moving ``each`` bytes per element: casts, and sums."""
    return [OperatorWork("weights", elements / count * each, 1)] * count if each else []


def cast(elements: float, widths: Widths) -> list[OperatorWork]:
    """Cast a tensor to the compute width, or its gradient back."""
    return matrices(1, elements, widths.states + widths.compute) if widths.casts else []


def summed(elements: float, widths: Widths) -> list[OperatorWork]:
    """Add a parameter's gradient to another."""
    return matrices(1, elements, 3 * widths.states)


class EndOperators(NamedTuple):
    forward: list[OperatorWork]
    backward: list[OperatorWork]


def head(
    model: Model, tokens: int, rows: int, widths: Widths, loss: tuple[Operator, ...] = LOSS
) -> EndOperators:
    """The last norm, the loss over ``rows`` of the vocabulary, and the casts and sums of the head's weight.

    All gradients are computed with the loss, chunk by chunk.
    """
    at_once = tokens_at_once(rows)
    sizes = [min(at_once, tokens - start) for start in range(0, tokens, at_once)]
    norm, norm_back = _norm(model, tokens * model.hidden, widths)
    forward = [norm, *(moved("loss", loss, size * rows, widths) for size in sizes)]
    matrix = rows * model.hidden
    forward += cast(matrix, widths)
    if len(sizes) > 1:
        # The first chunk's weight gradient is written wide, the others' are added to it as they are computed.
        forward += matrices(1, matrix, widths.wide - widths.compute)
        forward += matrices(len(sizes) - 1, matrix * (len(sizes) - 1), 2 * widths.wide - widths.compute)
        forward += matrices(1, matrix, widths.wide + widths.states if widths.states < widths.wide else 0)
    elif widths.casts:
        forward += matrices(1, matrix, widths.compute + widths.states)
    return EndOperators(forward, [norm_back])


def embedding(model: Model, tokens: int, rows: int, widths: Widths, joined: bool) -> EndOperators:
    """Rows looked up, and their gradients accumulated into a whole matrix. ``joined``: added to the tied head's."""
    elements = tokens * model.hidden
    forward = [OperatorWork("lookup", 2 * elements * widths.states, 1)]
    backward = [OperatorWork("lookup backward", (elements + rows * model.hidden) * widths.states, 1)]
    forward += cast(elements, widths)
    backward += cast(elements, widths)
    if model.positions == "learned":
        forward += [*forward, moved("add", [ADD], elements, widths)]
        backward += [
            OperatorWork(
                "lookup backward", (elements + model.max_positions * model.hidden) * widths.states, 1
            ),
            *backward[1:],
        ]
    if joined:
        backward += summed(rows * model.hidden, widths)
    return EndOperators(forward, backward)


NOTHING = EndOperators([], [])


def dropout(elements: float, widths: Widths) -> EndOperators:
    """A mask of hashes with one byte per element; scaled and applied, forward and backward."""
    mask = OperatorWork("mask", MASK_BYTES * elements, MASK_OPERATORS)
    each = moved("add", [COPY, COPY], elements, widths)
    return EndOperators([mask, each], [each])


@lru_cache(maxsize=256)
def operators(model: Model, widths: Widths) -> tuple[int, int]:
    """Operators per layer, forward and backward, including products and attention."""
    found = block(model, Tokens(1, 1, 1, 1, 1), widths)
    products = product_count(model)
    forward, backward = (sum(work.operators for work in way) for way in (found.forward, found.backward))
    casts = products if widths.casts else 0
    return forward + casts + products + 1, backward + casts + 2 * products + 1


def tensors(model: Model) -> int:
    """Number of parameters that an update goes through one by one."""
    norms = (4 if model.output_norms else 2) * (1 if model.norm == "rms" else 2) + 2 * model.qk_norm
    biases = len(biased(model, Tokens(1, 1, 1, 1, 1)))
    return model.layers * (product_count(model) + norms + biases) + 2


def product_count(model: Model) -> int:
    """Products of a dense layer: queries, keys, values, attention's output; the MLP's inputs and output."""
    return 7 if model.gated else 6
