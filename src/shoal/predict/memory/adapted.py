"""Activation memory of a block with adapters: frozen projections do not save their input for a weight gradient.

A projection with an adapter saves its input, which the first factor reads, and the low-rank vector between the
factors. Nothing before the first adapter needs a gradient, since the embedding is frozen: this concerns the first
block, up to its first adapter (``entry``). Peaks are those of ``activations``. For blocks with routed experts see
``adapted_experts``.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

from shoal.facts.layout.buckets import even_share
from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import block_parameters, is_matrix
from shoal.facts.model.tensor_split import tensor_part
from shoal.facts.nf4 import AT_ONCE, BLOCK, SCALE_BYTES
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
# Latent attention: projections that read the block's first norm, and those that read the low-rank vectors.
INTO_LATENT, OUT_OF_LATENT = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("q_b_proj", "kv_b_proj")


class AdaptedParts(NamedTuple):
    """What autograd saves of a block, in bytes."""

    first_norm: float
    attention: float  # with the inputs of its projections
    second_norm: float
    mlp: float  # with the inputs of its projections
    product: float  # of that, down_proj's input
    dropout: float
    has_input: bool  # whether a norm saves the residual stream itself rather than a widened copy
    streamed: bool = True  # whether the residual stream has a gradient after attention

    @property
    def all(self) -> float:
        return self.first_norm + self.attention + self.second_norm + self.mlp + self.dropout


@lru_cache(maxsize=65536)
def adapted_activations(
    model: Model, window: bool, entry: bool, adapters: Adapters, work: BlockWorkload
) -> BlockActivations:
    """One block without experts. ``entry``: nothing before it is trained."""
    if work.compiled and work.recompute != "full" and model.latent is None:
        return _compiled(model, adapters, work)
    c, tokens = work.compute, work.tokens
    has = set(adapters.targets).__contains__
    inner = float(c * tokens * even_share(model.ffn, work.tp))
    stream, whole = c * model.hidden * work.stream, c * model.hidden * tokens
    kept = _kept(model, window, entry, adapters, work)
    ways_in = 2 if model.gated else 1
    narrow = float(c * adapters.rank * tokens)
    count = sum(map(has, projection_names(model, False)))
    if work.recompute == "none":
        resting, shared = kept.all, kept.all
    else:
        resting, shared = stream, stream if kept.has_input else 0.0
        if work.recompute == "selective":
            products = attention_products(model, False, work) + ways_in * inner + narrow * count
            resting, shared = resting + products + whole, shared + products
            if work.dropout or has("down_proj"):
                shared += whole  # the last product is read again, then freed
    gathered = whole if work.sp else 0.0
    held = kept.all - kept.dropout / 2
    after_mlp = held - kept.mlp - kept.second_norm
    unpacked = partial(unpacked_bytes, model, False, adapters, work)
    opening = kept.all + stream + gathered + max(inner, unpacked("down_proj", inner))
    moments = [BlockPeak(held - kept.product + stream + (1 + ways_in) * inner, 1)]
    if has("down_proj"):
        # The weight and the first factor both produce an input gradient; plus their sum or, before it, the dropout
        # mask.
        mask = inner / c - narrow if adapters.dropout else 0.0
        moments.insert(0, BlockPeak(held - kept.product + mask + stream + 3 * inner, 1))
    if work.recompute != "none":
        # The end of the recomputed forward pass, beside the entering gradient: what has not been freed yet.
        repeated = kept.all + stream + gathered + (whole if has("down_proj") else inner)
        # With dropout, adapters do not save the shared input, which lives only while its projections are computed.
        apart = adapters.dropout > 0
        repeated += (0.0 if any(map(has, INTO_MLP)) and not apart else whole) + (stream if work.sp else 0.0)
        repeated += inner if has("down_proj") and apart else 0.0
        repeated += 0.0 if kept.has_input else stream
        moments.insert(0, BlockPeak(repeated, 0))
        if adapters.base == "nf4":
            # The last product does not exist yet if selective recomputation has saved it.
            made = whole if has("down_proj") and work.recompute == "full" else 0.0
            result = whole if work.recompute == "full" else 0.0
            moments.insert(0, BlockPeak(repeated - made + unpacked("down_proj", result), 0))
            if adapters.kind == "dora" and has("down_proj"):
                # Once more after it, for the lengths of its rows.
                lengths = _unpacked_in_steps(unpacked("down_proj", 0.0), work)
                moments.insert(0, BlockPeak(repeated + lengths, 0))
    read = what_is_read(adapters, INTO_MLP, c, whole)
    # The last of gate_proj and up_proj, beside the other's input gradient; its adapter has produced its own.
    last = max(whole, unpacked("up_proj", whole))
    later = [held - kept.mlp + read + stream + inner + whole + last]
    beside = whole if has("up_proj") else 0.0
    later.append(held - kept.mlp + read + stream + (1 + ways_in) * inner + beside + last)
    moments += attention_moments(model, kept, after_mlp, max(later), ways_in, stream, work)
    if gathered and work.rows > 1 and work.recompute == "none":
        moments.insert(0, BlockPeak(kept.all + stream + 2 * gathered, 0))
    put_off = inner if has("down_proj") else 0.0
    # Only first factors have gradients that can be deferred, which keeps their inputs alive.
    deferred = put_off + what_is_read(adapters, INTO_MLP, c, whole, False) + narrow * count
    deferred += read_in_attention(model, adapters, work)
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


def attention_moments(
    model: Model,
    kept: AdaptedParts,
    after_mlp: float,
    before: float,
    ways_in: int,
    stream: float,
    work: BlockWorkload,
) -> list[BlockPeak]:
    """Peaks from the second norm's backward pass to the first norm's. ``before``: the peak of gate_proj's and
    up_proj's backward pass.
    """
    c, tokens = work.compute, work.tokens
    query, key, value = projected_widths(model, work.tp)
    wider = stream if work.wide > c else 0.0
    later = [before]
    if kept.second_norm:
        later.append(after_mlp + norm_backward(model, work) + wider)
    if kept.attention:
        later.append(after_mlp + stream + c * tokens * (query + query + key + value))
    moments = [BlockPeak(max(later), 1 + ways_in)]
    for moment in context.moments(query, key, value, work) if work.context and kept.attention else ():
        bytes_then = after_mlp + stream + moment.activations
        moments.append(BlockPeak(bytes_then, 1 + ways_in, moment.buffers))
    if kept.first_norm:
        moments.append(BlockPeak(norm_backward(model, work) + wider, None))
    return moments


def _compiled(model: Model, adapters: Adapters, work: BlockWorkload) -> BlockActivations:
    """A compiled block saves the same list as a fully trained one, plus the vectors between the factors."""
    block = compiled_activations(model, work)
    narrow = float(work.compute * adapters.rank * work.tokens)
    kept = narrow * sum(map(set(adapters.targets).__contains__, projection_names(model, False)))
    return block._replace(resting=block.resting + kept)


def unpacked_bytes(
    model: Model, experts: bool, adapters: Adapters, work: BlockWorkload, name: str, result: float
) -> float:
    """A product with a 4-bit weight: the unpacked weight and the output. 0 if the weight is not in 4 bits."""
    if adapters.base != "nf4":
        return 0.0
    every = block_parameters(model, experts)
    parameter = next((one for one in every if one.name.endswith(f"{name}.weight")), None)
    if parameter is None:
        return 0.0
    size = math.prod(tensor_part(parameter, work.tp, 0).box.shape)
    return float(work.compute * size) + result


def _unpacked_in_steps(unpacked: float, work: BlockWorkload) -> float:
    """Without an unpacking kernel: also a chunk of levels in fp32, the same times their scales, and the scales."""
    values = min(unpacked / work.compute, AT_ONCE) if work.cpu else 0.0
    return unpacked + 2 * 4 * values + SCALE_BYTES * values / BLOCK


def what_is_read(
    adapters: Adapters, names: tuple[str, ...], compute: int, read: float, flows: bool = True
) -> float:
    """What these projections' adapters save of the ``read`` bytes that all of them read.

    One shared tensor, unless there is dropout: then each has its own dropped copy and, if a gradient continues from it
    (``flows``), a mask of one byte per value.
    """
    found = sum(name in adapters.targets for name in names)
    return found * (read + flows * read / compute) if adapters.dropout else min(found, 1) * read


@lru_cache(maxsize=1024)
def projection_names(model: Model, experts: bool) -> tuple[str, ...]:
    """The projections of a block that can have adapters."""
    every = block_parameters(model, experts)
    return tuple(one.name.rsplit(".", 2)[-2] for one in every if is_matrix(one.name, one.shape))


def attention_products(model: Model, experts: bool, work: BlockWorkload) -> float:
    """Bytes of the outputs of attention's projections."""
    rows = (
        tensor_part(one, work.tp, 0).box.shape[0]
        for one in block_parameters(model, experts)
        if ".self_attn." in one.name and is_matrix(one.name, one.shape)
    )
    return float(work.compute * work.tokens * sum(rows))


def read_in_attention(model: Model, adapters: Adapters, work: BlockWorkload) -> float:
    """Inputs of the first factors of attention's adapters, while their weight gradients are deferred."""
    c, tokens = work.compute, work.tokens
    query, _, value = projected_widths(model, work.tp)
    into = INTO_ATTENTION if model.latent is None else INTO_LATENT
    found = what_is_read(adapters, into, c, float(c * model.hidden * tokens), False)
    found += c * tokens * (query if model.latent is None else value) * ("o_proj" in adapters.targets)
    return found + _read_narrow(model, adapters, work, False)


def _read_narrow(model: Model, adapters: Adapters, work: BlockWorkload, flows: bool) -> float:
    """The part of latent attention's low-rank vectors that adapters read."""
    if model.latent is None:
        return 0.0
    widths = zip(OUT_OF_LATENT, (model.latent.q_rank or 0, model.latent.kv_rank), strict=True)
    c, tokens = work.compute, work.tokens
    return sum(what_is_read(adapters, (name,), c, float(c * tokens * width), flows) for name, width in widths)


def attention_parts(
    model: Model, window: bool, entry: bool, adapters: Adapters, work: BlockWorkload
) -> tuple[float, bool, bool]:
    """Bytes that attention saves; whether its output has a gradient; and whether the stream behind it has one."""
    c, tokens = work.compute, work.tokens
    has = set(adapters.targets).__contains__
    narrow, whole = float(c * adapters.rank * tokens), float(c * model.hidden * tokens)
    query, _, value = projected_widths(model, work.tp)
    names = INTO_ATTENTION if model.latent is None else (*INTO_LATENT, *OUT_OF_LATENT)
    attended = not entry or any(map(has, names))
    into = INTO_ATTENTION if model.latent is None else INTO_LATENT
    found = what_is_read(adapters, into, c, whole, not entry)
    found += attention_keeps(model, window, work) if attended else 0.0
    found += narrow * sum(map(has, (*names, "o_proj")))
    if entry and attended and model.qk_norm:
        # Heads that nothing trained produced are normed without saving anything for a gradient.
        heads, key_heads = (even_share(count, work.tp) for count in (model.heads, model.kv_heads))
        still = heads * ("q_proj" not in adapters.targets) + key_heads * ("k_proj" not in adapters.targets)
        found -= work.wide * tokens * still * (model.head_dim + 1)
    given = query
    if model.latent is not None:
        # ``attention_keeps`` includes the inputs of frozen projections as well.
        given = value
        everything = value + model.latent.kv_rank + (model.latent.q_rank or 0)
        found -= c * tokens * everything if attended else 0.0
        found += _read_narrow(model, adapters, work, attended)
    if has("o_proj") and (adapters.dropout or model.latent is not None):
        found += what_is_read(adapters, ("o_proj",), c, float(c * tokens * given), attended)
    elif has("o_proj"):
        # o_proj's input is attention's output, which is already saved, or a copy of it.
        found += turned_copy(model, window, work) or (0.0 if attended else float(c * tokens * given))
    return found, attended, attended or has("o_proj")


def multiplied(model: Model, experts: bool, adapters: Adapters, work: BlockWorkload, inside: str) -> float:
    """DoRA, for the projections in one part of the block: the tensor scaled by each row's trained length, that length,
    and the norm it is divided by, all saved."""
    if adapters.kind != "dora":
        return 0.0
    found = 0
    for one in block_parameters(model, experts):
        named = f".{inside}." in one.name and one.name.rsplit(".", 2)[-2] in adapters.targets
        if named and is_matrix(one.name, one.shape):
            found += tensor_part(one, work.tp, 0).box.shape[0]
    return float((work.compute * (work.tokens + 1) + work.wide) * found)


def mlp_parts(
    model: Model, width: int, adapters: Adapters, work: BlockWorkload, streamed: bool
) -> tuple[float, float]:
    """Bytes saved by an MLP of this width, and of these, down_proj's input."""
    c, tokens = work.compute, work.tokens
    has = set(adapters.targets).__contains__
    narrow, whole = float(c * adapters.rank * tokens), float(c * model.hidden * tokens)
    inner = float(c * tokens * even_share(width, work.tp))
    gate = up = streamed
    gate, up = gate or has("gate_proj"), up or has("up_proj")
    if model.gated:
        # Gate and up if the gate has a gradient; the gate's activation if up has one.
        mlp = inner * (2 * gate + up)
    else:
        mlp = inner * up * (0 if model.activation == "relu" else 1)
    product = what_is_read(adapters, ("down_proj",), c, inner, gate or up)
    if not model.gated and model.activation == "relu" and up:
        product = inner + (product if adapters.dropout else 0.0)  # ReLU needs only its output
    mlp += product + what_is_read(adapters, INTO_MLP if model.gated else ("up_proj",), c, whole, streamed)
    mlp += narrow * sum(map(has, (*(("gate_proj",) if model.gated else ()), "up_proj", "down_proj")))
    return mlp, product


def _kept(model: Model, window: bool, entry: bool, adapters: Adapters, work: BlockWorkload) -> AdaptedParts:
    attention, _, streamed = attention_parts(model, window, entry, adapters, work)
    mlp, product = mlp_parts(model, model.ffn, adapters, work, streamed)
    return around(
        model,
        entry,
        streamed,
        work,
        attention + multiplied(model, False, adapters, work, "self_attn"),
        mlp + multiplied(model, False, adapters, work, "mlp"),
        product,
    )


def around(
    model: Model,
    entry: bool,
    streamed: bool,
    work: BlockWorkload,
    attention: float,
    mlp: float,
    product: float,
) -> AdaptedParts:
    """Add the block's norms and dropout masks."""
    norm = norm_keeps(model, work) * work.stream
    masks = 2 if streamed else 1
    return AdaptedParts(
        first_norm=0.0 if entry else norm,
        attention=attention,
        second_norm=norm if streamed else 0.0,
        mlp=mlp,
        product=product,
        dropout=masks * model.hidden * work.stream if work.dropout or work.stack.dropout else 0.0,
        has_input=model.norm == "layer" or work.stack.norms == "fused" or work.compute >= 4,
        streamed=streamed,
    )
