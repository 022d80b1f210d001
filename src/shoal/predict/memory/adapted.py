"""Activation memory of a block with adapters: what is frozen keeps nothing of its input for a weight's gradient.

A projection with an adapter keeps its input, which the first factor reads, and the narrow vector between the two.
What no adapter comes before needs no gradient at all: so it is in the first block of a network, up to its first adapter
(``entry``), for the embedding is frozen. Moments are those of ``activations``.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

from shoal.facts.layout.buckets import even_share
from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import block_parameters
from shoal.facts.model.tensor_split import tensor_part
from shoal.predict.memory import context
from shoal.predict.memory.activations import (
    attention_keeps,
    norm_backward,
    norm_keeps,
    projected_widths,
    turned_copy,
)
from shoal.predict.memory.block_workload import BlockActivations, BlockPeak, BlockWorkload
from shoal.predict.memory.compiled import compiled_activations

INTO_ATTENTION, INTO_MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class _Kept(NamedTuple):
    """What autograd keeps of a block, in bytes."""

    first_norm: float
    attention: float  # with what its projections read
    second_norm: float
    mlp: float  # with what its projections read
    product: float  # of that, what its way out reads
    dropout: float
    has_input: bool  # whether a norm keeps the residual stream itself, and not a wider copy

    @property
    def all(self) -> float:
        return self.first_norm + self.attention + self.second_norm + self.mlp + self.dropout


@lru_cache(maxsize=65536)
def adapted_activations(
    model: Model, window: bool, entry: bool, adapters: Adapters, work: BlockWorkload
) -> BlockActivations:
    """One block without experts. ``entry``: nothing before it is trained."""
    if work.compiled and work.recompute != "full":
        return _compiled(model, adapters, work)
    c, tokens = work.compute, work.tokens
    has = set(adapters.targets).__contains__
    query, key, value = projected_widths(model, work.tp)
    inner = float(c * tokens * even_share(model.ffn, work.tp))
    stream, whole = c * model.hidden * work.stream, c * model.hidden * tokens
    kept = _kept(model, window, entry, adapters, work)
    ways_in = 2 if model.gated else 1
    narrow = float(c * adapters.rank * tokens)
    if work.recompute == "none":
        resting, shared = kept.all, kept.all
    else:
        resting, shared = stream, stream if kept.has_input else 0.0
        if work.recompute == "selective":
            products = float(c * tokens * (query + key + value)) + whole + ways_in * inner
            products += narrow * sum(map(has, _projections(model)))
            resting, shared = resting + products + whole, shared + products
            if work.dropout or has("down_proj"):
                shared += whole  # the last product is used again, and let go
    gathered = whole if work.sp else 0.0
    held = kept.all - kept.dropout / 2
    after_mlp = held - kept.mlp - kept.second_norm
    unpacked = partial(_unpacked, model, adapters, work)
    opening = kept.all + stream + gathered + max(inner, unpacked("down_proj", inner))
    moments = [BlockPeak(held - kept.product + stream + (1 + ways_in) * inner, 1)]
    if has("down_proj"):
        # The weight and the first factor both make a gradient of what they read; and the sum of the two, or, before
        # it, what dropout leaves of one.
        mask = inner / c - narrow if adapters.dropout else 0.0
        moments.insert(0, BlockPeak(held - kept.product + mask + stream + 3 * inner, 1))
    if work.recompute != "none":
        # The end of the repeated forward pass, beside the gradient that enters: what is yet to be let go of.
        repeated = kept.all + stream + gathered + (whole if has("down_proj") else inner)
        # With dropout adapters keep none of what is read, which is there as long as its projections are computed.
        apart = adapters.dropout > 0
        repeated += (0.0 if any(map(has, INTO_MLP)) and not apart else whole) + (stream if work.sp else 0.0)
        repeated += inner if has("down_proj") and apart else 0.0
        repeated += 0.0 if kept.has_input else stream
        moments.insert(0, BlockPeak(repeated, 0))
        if adapters.base == "nf4":
            # Of the last product, which selective recomputation has kept, there is nothing yet.
            made = whole if has("down_proj") and work.recompute == "full" else 0.0
            result = whole if work.recompute == "full" else 0.0
            moments.insert(0, BlockPeak(repeated - made + unpacked("down_proj", result), 0))
    read = _read(adapters, INTO_MLP, c, whole)
    # The last way in, beside what the others made of their gradients; its adapter has made its own.
    last = max(whole, unpacked("up_proj", whole))
    later = [held - kept.mlp + read + stream + inner + whole + last]
    beside = whole if has("up_proj") else 0.0
    later.append(held - kept.mlp + read + stream + (1 + ways_in) * inner + beside + last)
    wider = stream if work.wide > c else 0.0
    if kept.second_norm:
        later.append(after_mlp + norm_backward(model, work) + wider)
    if kept.attention:
        later.append(after_mlp + stream + c * tokens * (query + query + key + value))
    moments.append(BlockPeak(max(later), 1 + ways_in))
    for moment in context.moments(query, key, value, work) if work.context and kept.attention else ():
        bytes_then = after_mlp + stream + moment.activations
        moments.append(BlockPeak(bytes_then, 1 + ways_in, moment.buffers))
    if kept.first_norm:
        moments.append(BlockPeak(norm_backward(model, work) + wider, None))
    if gathered and work.rows > 1 and work.recompute == "none":
        moments.insert(0, BlockPeak(kept.all + stream + 2 * gathered, 0))
    put_off = inner if has("down_proj") else 0.0
    # First factors alone have gradients that can wait: for what they read.
    deferred = put_off + sum(_read(adapters, names, c, whole, False) for names in (INTO_ATTENTION, INTO_MLP))
    deferred += c * tokens * query if has("o_proj") else 0.0
    deferred += narrow * sum(map(has, _projections(model)))
    return BlockActivations(
        resting=resting,
        working=tuple(moment._replace(bytes=moment.bytes - shared) for moment in moments),
        opening=opening - shared,
        inner=inner,
        rounding=0.0,
        put_off=put_off,
        deferred=deferred,
        held_input=work.recompute != "none" or (kept.has_input and not entry),
        reads_input=kept.has_input,
    )


def _compiled(model: Model, adapters: Adapters, work: BlockWorkload) -> BlockActivations:
    """It keeps the list of a block that is trained whole, frozen or not, and what lies between two factors."""
    block = compiled_activations(model, work)
    narrow = float(work.compute * adapters.rank * work.tokens)
    kept = narrow * sum(map(set(adapters.targets).__contains__, _projections(model)))
    return block._replace(resting=block.resting + kept)


def _unpacked(model: Model, adapters: Adapters, work: BlockWorkload, name: str, result: float) -> float:
    """A product with a weight in 4 bits: the weight as it is used, and what it gives; 0: it is not in 4 bits."""
    if adapters.base != "nf4":
        return 0.0
    parameter = next(one for one in block_parameters(model, False) if one.name.endswith(f"{name}.weight"))
    size = math.prod(tensor_part(parameter, work.tp, 0).box.shape)
    return float(work.compute * size) + result


def _read(adapters: Adapters, names: tuple[str, ...], compute: int, read: float, flows: bool = True) -> float:
    """What adapters of these keep of the ``read`` bytes that all of them read.

    It is one tensor, but with dropout: there each has its own of what is left, and, where a gradient goes on from it
    (``flows``), a mask of a byte a value.
    """
    found = sum(name in adapters.targets for name in names)
    return found * (read + flows * read / compute) if adapters.dropout else min(found, 1) * read


def _projections(model: Model) -> tuple[str, ...]:
    gate = ("gate_proj",) if model.gated else ()
    return (*INTO_ATTENTION, "o_proj", *gate, "up_proj", "down_proj")


def _kept(model: Model, window: bool, entry: bool, adapters: Adapters, work: BlockWorkload) -> _Kept:
    c, tokens = work.compute, work.tokens
    has = set(adapters.targets).__contains__
    narrow, whole = float(c * adapters.rank * tokens), float(c * model.hidden * tokens)
    query, inner = projected_widths(model, work.tp)[0], float(c * tokens * even_share(model.ffn, work.tp))
    norm = norm_keeps(model, work) * work.stream
    has_input = model.norm == "layer" or work.stack.norms == "fused" or c >= 4
    into = any(map(has, INTO_ATTENTION))
    attended = not entry or into
    attention = _read(adapters, INTO_ATTENTION, c, whole, not entry)
    attention += attention_keeps(model, window, work) if attended else 0.0
    if has("o_proj") and adapters.dropout:
        attention += _read(adapters, ("o_proj",), c, float(c * tokens * query), attended)
    elif has("o_proj"):
        # Its input is attention's result, or a copy of it. Without a copy it is kept once.
        attention += turned_copy(model, window, work) or (0.0 if attended else float(c * tokens * query))
    attention += narrow * sum(map(has, (*INTO_ATTENTION, "o_proj")))
    streamed = attended or has("o_proj")  # whether the residual stream has a gradient after attention
    gate = up = streamed
    gate, up = gate or has("gate_proj"), up or has("up_proj")
    if model.gated:
        # Gate and up, where the first has a gradient; gate's activation, where the second has.
        mlp = inner * (2 * gate + up)
    else:
        mlp = inner * up * (0 if model.activation == "relu" else 1)
    product = _read(adapters, ("down_proj",), c, inner, gate or up)
    if not model.gated and model.activation == "relu" and up:
        product = inner + (product if adapters.dropout else 0.0)  # it is its own result
    mlp += product + _read(adapters, INTO_MLP if model.gated else ("up_proj",), c, whole, streamed)
    mlp += narrow * sum(map(has, (*(("gate_proj",) if model.gated else ()), "up_proj", "down_proj")))
    if adapters.kind == "dora":
        # What a row's trained length multiplies.
        widths = dict(zip(INTO_ATTENTION, projected_widths(model, work.tp), strict=True))
        attention += sum(c * tokens * width for name, width in widths.items() if has(name))
        attention += whole * has("o_proj")
        mlp += inner * sum(map(has, INTO_MLP if model.gated else ("up_proj",))) + whole * has("down_proj")
    masks = 2 if streamed else 1
    return _Kept(
        first_norm=0.0 if entry else norm,
        attention=attention,
        second_norm=norm if streamed else 0.0,
        mlp=mlp,
        product=product,
        dropout=masks * model.hidden * work.stream if work.dropout or work.stack.dropout else 0.0,
        has_input=has_input,
    )
