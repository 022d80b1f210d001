"""Activation memory: what one block saves of a micro-batch for its backward pass, and what that pass adds.

Counted tensor by tensor, as autograd keeps them: c bytes a value of the computation, w bytes (at least 4) where norms
and rotations are computed. A split projection has 1/tp of the features and all of the tensor group's tokens; the
residual stream has, with sequence parallelism, 1/tp of the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.facts.cluster.attention_kernels import answers_by_token, repeats_keys
from shoal.facts.layout.buckets import even_share
from shoal.facts.model import Model
from shoal.predict.memory import context
from shoal.predict.memory.block_workload import BlockActivations, BlockPeak, BlockWorkload
from shoal.predict.memory.compiled import compiled_activations

# Bytes of a value that is rounded, and of the copy that is rounded.
FLOAT8, ROUNDED_IN = 1, 4


class KeptTensors(NamedTuple):
    """What autograd keeps of a block, place by place, in bytes."""

    norm: float  # one of the two norms on the residual stream
    entered: float  # its result, which projections read
    attention: float
    mlp: float
    dropout: float
    has_input: bool  # whether a norm keeps the residual stream itself, and not a wider copy

    @property
    def all(self) -> float:
        return 2 * (self.norm + self.entered) + self.attention + self.mlp + self.dropout


@lru_cache(maxsize=65536)
def block_activations(model: Model, experts: bool, window: bool, work: BlockWorkload) -> BlockActivations:
    """One block, with experts in it or without, with a window that is shorter than the sequence or without."""
    # What a compiled block keeps is known of those that the engine runs; of others it is priced as of eager ones.
    if work.compiled and not experts and model.latent is None and work.adapters is None:
        return compiled_activations(model, work)
    parts = _parts(model, experts, window, work)
    c, tokens = work.compute, work.tokens
    stream = c * model.hidden * work.stream
    inner, values, travelling = _mlp(model, experts, work)
    query, key, _ = _widths(model, work.tp)
    products = c * tokens * (query + 2 * key) + inner * c * (2 if model.gated else 1)
    if work.recompute == "none":
        # In a narrow computation the norms keep a wider copy, and the input itself goes.
        resting, shared = parts.all, parts.all
    elif work.recompute == "full":
        resting, shared = stream, stream if parts.has_input else 0.0
    else:
        kept, again = _selected(model, parts, c * inner, travelling, work)
        resting, shared = stream + kept, (stream if parts.has_input else 0.0) + again
        if work.dropout or work.fp8:
            # Dropout reads the last product again, a product in fp8 is taken again as a whole: both let go of it.
            shared += c * model.hidden * tokens
    held_input = work.recompute != "none" or parts.has_input
    residual = 4 * c * model.hidden * tokens
    deferred = residual + c * tokens * query + products + c * inner
    # The gradient that enters is first gathered from the tensor ranks.
    gathered = c * model.hidden * tokens if work.sp else 0.0
    opening = parts.all + stream + gathered + c * inner
    working = _working(model, parts, stream, c * inner, values, travelling, work)
    if travelling:
        # Results are multiplied with the gradient that comes in, once for each expert that a token has.
        working = (BlockPeak(parts.all + stream + gathered + 2 * travelling, 0), *working)
    if gathered and work.rows > 1 and work.recompute == "none":
        # Ranks send their parts of all sequences one after the other: they are put in order. Where the forward pass is
        # repeated, that comes later.
        working = (BlockPeak(parts.all + stream + 2 * gathered, 0), *working)
    return BlockActivations(
        resting=resting,
        working=tuple(moment._replace(bytes=moment.bytes - shared) for moment in working),
        opening=opening - shared,
        inner=c * inner,
        rounding=_rounding(model.hidden * tokens, inner) if work.fp8 else 0.0,
        put_off=c * inner + gathered,
        deferred=deferred,
        held_input=held_input,
        reads_input=parts.has_input,
    )


def _rounding(gradients: float, inputs: float) -> float:
    """The operands of a weight's gradient in fp8, the second as it is rounded: beside it lies a copy in fp32.

    Of an MLP's way out, that is: nowhere else are so many values rounded beside so much that is kept.
    """
    return FLOAT8 * (gradients + inputs) + ROUNDED_IN * inputs


def _parts(model: Model, experts: bool, window: bool, work: BlockWorkload) -> KeptTensors:
    c, tokens, stack = work.compute, work.tokens, work.stack
    frozen = work.adapters is not None
    has_input = model.norm == "layer" or stack.norms == "fused" or c >= 4
    norm = norm_keeps(model, work) * work.stream
    entered = c * model.hidden * (work.stream if stack.regathers else tokens)
    if model.parallel_residual and has_input:
        norm -= c * model.hidden * work.stream / 2  # both norms keep the same input
    if frozen and not {"gate_proj", "up_proj"} & set(work.adapters or ()):
        entered /= 2  # the MLP's input is not needed
    inner, values, _ = _mlp(model, experts, work)
    if frozen and "down_proj" not in (work.adapters or ()):
        values -= c * inner
    dropout = 2 * model.hidden * work.stream if work.dropout or stack.dropout else 0.0
    return KeptTensors(
        norm=norm,
        entered=entered,
        attention=_attention(model, window, work),
        mlp=values,
        dropout=dropout,
        has_input=has_input,
    )


def norm_keeps(model: Model, work: BlockWorkload) -> float:
    """A token's bytes that a norm on the residual stream keeps, but for its result."""
    if model.norm == "layer":
        return work.compute * model.hidden + 8
    return _norm(model.hidden, work)


def norm_backward(model: Model, work: BlockWorkload) -> float:
    """The fullest moment of a norm's backward pass. Step by step: its input, and five tensors of that width."""
    if model.norm == "rms" and work.stack.norms == "eager":
        return (6 * work.wide * model.hidden + work.wide) * work.stream
    return (norm_keeps(model, work) + 2 * work.compute * model.hidden) * work.stream


def _norm(width: int, work: BlockWorkload) -> float:
    """A token's bytes that an RMS norm keeps, but for its result.

    In steps: the input in at least fp32 (a copy, unless it is that wide already), 1 / root mean square, and the scaled
    input in the computation's precision, which only the weight's gradient needs. In one kernel: input and scale.
    """
    if work.stack.norms == "fused":
        return work.compute * width + 4
    scaled = work.compute * width if work.adapters is None else 0
    return work.wide * (width + 1) + scaled


def _widths(model: Model, tp: int) -> tuple[int, int, int]:
    """Features of queries, of keys and of values on a rank of a tensor group."""
    if model.latent is not None:
        heads = even_share(model.heads, tp)
        query = heads * (model.latent.nope_dim + model.latent.rope_dim)
        return query, query, heads * model.latent.value_dim
    key = even_share(model.kv_heads, tp) * model.head_dim
    return even_share(model.heads, tp) * model.head_dim, key, key


def _attention(model: Model, window: bool, work: BlockWorkload) -> float:
    c, stack = work.compute, work.stack
    query, key, value = _widths(model, work.tp)
    heads, normed = even_share(model.heads, work.tp), query + key
    # A window's kernel keeps no scores, shares keys in every precision and answers token by token; so does a ring's.
    varlen = (window or work.context == "ring") and stack.attention == "flash" and model.latent is None
    if work.context == "ulysses" and model.latent is None:
        key = value = max(key, work.cp * model.head_dim)  # a head for every rank
    if model.latent is None:
        if repeats_keys(c) and not varlen:
            key = value = query
        kept: float = c * (query + key + value + query) + 4 * heads  # queries, keys, values, result, ln Σ exp
        if stack.joined and model.positions == "rotary":
            kept += c * (query + key)  # what was rotated are copies
    else:
        latent = model.latent
        # The values are a part of the projection that made them, and hold all of it.
        kept = c * (2 * query + heads * (latent.nope_dim + latent.value_dim) + value) + 4 * heads
        kept += _norm(latent.kv_rank, work) + c * latent.kv_rank
        if latent.q_rank is not None:
            kept += _norm(latent.q_rank, work) + c * latent.q_rank
    if model.qk_norm:
        kept += _norm(normed, work) + work.wide * (heads + even_share(model.kv_heads, work.tp) - 1)
    by_head = stack.kernel == "fused" and not answers_by_token(work.cpu, c)
    turned = (work.cpu or by_head) and not varlen and model.positions == "rotary" and heads > 1
    if turned or work.context == "ulysses":
        # Turned back, several heads are a copy; as are those that came from other ranks.
        kept += c * (query if model.latent is None else value)
    if stack.attention == "unfused":
        kept += (2 * c + 1) * heads * work.seq  # scores, dropped scores and which were dropped
    return kept * work.tokens


def _mlp(model: Model, experts: bool, work: BlockWorkload) -> tuple[float, float, float]:
    """Values of one inner tensor; bytes kept of the whole MLP; of these, tokens as their experts read them."""
    c, fused = work.compute, work.stack.activation == "fused"
    # Gate, its activation, up, their product; without a gate: up and its activation. Fused: that is made anew.
    tensors = (3 if fused else 4) if model.gated else (1 if model.activation == "relu" else 2)
    if not experts or model.experts is None:
        inner = work.tokens * even_share(model.ffn, work.tp)
        return inner, tensors * c * inner, 0.0
    found = model.experts
    routed = work.tokens * found.active
    inner = routed * even_share(found.ffn, work.tp) + work.tokens * even_share(found.shared_ffn, work.tp)
    # Tokens as their experts read them, and what experts make of them, which the router's gradient needs.
    travelling = c * model.hidden * routed
    # Scores of all experts; of those chosen, weights as they were and are, numbers, and places after sorting.
    scores = work.wide * (found.count + 1) * work.stream + (2 * work.wide + 24) * routed
    return inner, tensors * c * inner + 2 * travelling + scores, float(travelling)


def _selected(
    model: Model, parts: KeptTensors, inner: float, travelling: float, work: BlockWorkload
) -> tuple[float, float]:
    """Bytes that selective recomputation keeps besides the input, and which of them ``parts`` counts as well."""
    c, tokens = work.compute, work.tokens
    query, key, value = _widths(model, work.tp)
    gates = inner * (2 if model.gated else 1)
    if work.stack.selective == "scores":
        scores = (2 * c + 1) * even_share(model.heads, work.tp) * work.seq * tokens
        kept = parts.all - (scores if work.stack.attention == "unfused" else 0.0)
        return kept, kept
    if work.stack.selective == "half":
        # Of q, k, v, o, gate, up, down every second: q, v, gate, down; and attention's result.
        used = c * tokens * (query + value + query) + inner
        return used + c * tokens * model.hidden, used
    products = c * tokens * (query + key + value + model.hidden) + gates
    # Every product is let go as it is used again; the last one, which is not used, stays.
    return products + (travelling or c * tokens * model.hidden), products


def _working(
    model: Model,
    parts: KeptTensors,
    stream: float,
    inner: float,
    mlp: float,
    travelling: float,
    work: BlockWorkload,
) -> tuple[BlockPeak, ...]:
    """What is there of the block's own tensors and their gradients, in the order of time."""
    c, tokens = work.compute, work.tokens
    query, key, value = _widths(model, work.tp)
    ways_in = 2 if model.gated else 1
    # The MLP's dropout comes first, and its mask has gone.
    held = parts.all - parts.dropout / 2
    after_mlp = held - mlp - parts.entered - parts.norm
    later = (
        # Its way in: what each of the projections makes of its gradient, still apart.
        held - mlp + stream + inner + (ways_in * (travelling or c * model.hidden * tokens)) + travelling,
        # The second norm, after the MLP's tensors have gone. In one precision the two gradients of the stream are one.
        after_mlp + norm_backward(model, work) + (stream if work.wide > c else 0.0),
        # Attention: gradients of its result, queries, keys and values.
        after_mlp + stream + c * tokens * (query + query + key + value),
    )
    # By then the way out of attention has its weight's gradient too.
    ways_out = query / even_share(model.ffn, work.tp)
    shared = [
        BlockPeak(after_mlp + stream + moment.activations, 1 + ways_in + ways_out, moment.buffers)
        for moment in (context.moments(query, key, value, work) if work.context else ())
    ]
    # The activation: the gradients of its two factors and of their product, which itself is gone.
    activation = held - travelling + stream + ways_in * inner
    # The first norm, when nothing else of the block is left and all of its weights' gradients are there.
    end = norm_backward(model, work) + (stream if work.wide > c else 0.0)
    return BlockPeak(activation, 1), BlockPeak(max(later), 1 + ways_in), *shared, BlockPeak(end, None)
