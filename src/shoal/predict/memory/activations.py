"""Activation memory: what one block saves per micro-batch for its backward pass, and what that pass adds.

Counted tensor by tensor, as autograd saves them: c bytes per value in the compute precision, w bytes (at least 4)
where norms and rotations compute. A split projection has 1/tp of the features and all of the tensor group's tokens;
with sequence parallelism, the residual stream has 1/tp of the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.facts.cluster.attention_kernels import answers_by_token, repeats_keys
from shoal.facts.layout.buckets import even_share
from shoal.facts.model import Experts, Model
from shoal.predict.memory import context
from shoal.predict.memory.block_workload import BlockActivations, BlockPeak, BlockWorkload
from shoal.predict.memory.compiled import compiled_activations

# fp8 rounding: bytes of a rounded value, and of the fp32 copy it is rounded from.
FLOAT8, ROUNDED_IN = 1, 4


class KeptTensors(NamedTuple):
    """What autograd saves of a block, by place, in bytes."""

    norm: float  # by one of the two norms on the residual stream
    output_norm: float  # by one of the norms behind attention and MLP; 0 if there are none
    entered: float  # output of the first norm, which attention's projections read
    read: float  # output of the second norm, which the MLP's projections read
    attention: float
    mlp: float
    dropout: float
    has_input: bool  # whether a norm saves the residual stream itself rather than a widened copy

    @property
    def all(self) -> float:
        norms = 2 * (self.norm + self.output_norm)
        return norms + self.entered + self.read + self.attention + self.mlp + self.dropout


class RoutedTokens(NamedTuple):
    """Copies of tokens, one per active expert, in bytes. All 0 for a block without experts."""

    whole: float = 0.0  # as experts read them
    returned: float = 0.0  # the experts' outputs, if they are saved
    inner: float = 0.0  # the product of gate and up, if it is recomputed
    sent: float = 0.0  # as they are sent and returned: with ``ep``, a tensor rank's features of them
    shared: float = 0.0  # saved by shared experts
    crossed: float = 0.0  # tokens received from other nodes, each once

    def entering(self, work: BlockWorkload) -> float:
        """Gradients of the experts' outputs: of one part of the tokens as experts take them, of the other in transit,
        where they have left as well as where they arrive."""
        return self.whole / work.parts + 2 * self.sent * (1 - 1 / work.parts)

    def left(self, work: BlockWorkload) -> float:
        """Gradients of the experts' inputs once their backward pass is over: in transit, unless experts are here."""
        return self.whole if work.ep == 1 else 2 * (self.crossed or self.sent)


@lru_cache(maxsize=65536)
def block_activations(model: Model, experts: bool, window: bool, work: BlockWorkload) -> BlockActivations:
    """One block: with or without experts, with or without an attention window shorter than the sequence."""
    # Compiled blocks are known for what the engine runs; all others are priced as eager.
    if work.compiled and not experts and model.latent is None and work.adapters is None:
        return compiled_activations(model, work)
    parts = _parts(model, experts, window, work)
    c, tokens = work.compute, work.tokens
    stream = c * model.hidden * work.stream
    inner, values, routed = _mlp(model, experts, work)
    query, key, _ = projected_widths(model, work.tp)
    products = c * tokens * (query + 2 * key) + inner * c * (2 if model.gated else 1)
    if work.recompute == "none":
        # In half precision the norms save a widened copy, and the input itself is freed.
        resting, shared = parts.all, parts.all
    elif work.recompute == "full":
        resting, shared = stream, stream if parts.has_input else 0.0
    else:
        kept, again = _selected(model, parts, c * inner, routed, work)
        resting, shared = stream + kept, (stream if parts.has_input else 0.0) + again
        if (work.dropout or work.fp8) and not model.output_norms:
            # Dropout, and products in fp8, do not need the last product, so both free it.
            shared += c * model.hidden * tokens
    held_input = work.recompute != "none" or parts.has_input
    residual = 4 * c * model.hidden * tokens
    deferred = residual + c * tokens * query + products + c * inner
    # The entering gradient is first all-gathered from the tensor ranks.
    gathered = c * model.hidden * tokens if work.sp else 0.0
    opening = parts.all + stream + gathered + c * inner
    if routed.inner:
        # The gradient of the experts' outputs; the recomputed product, and the gradients of gate and up.
        opening = parts.all - routed.returned + stream + routed.entering(work) + 3 * routed.inner / work.parts
    if model.output_norms:
        # The stream has one gradient, and the MLP's output behind the norm another.
        opening += (0.0 if work.sp else stream) - parts.output_norm
    working = _working(model, parts, stream, c * inner, values, routed, work)
    forward = 0.0
    if routed.whole:
        forward = in_computing(model, parts.all, routed, work)
        mixing = in_mixing(model, parts.all, stream, gathered, routed, work)
        if work.recompute != "none":
            mixing = max(mixing, forward)
        working = (BlockPeak(mixing, 0), *working)
    if gathered and work.rows > 1 and work.recompute == "none":
        # Ranks send their parts of all sequences one after another, so these are reordered. With recomputation this
        # happens later.
        working = (BlockPeak(parts.all + stream + 2 * gathered, 0), *working)
    # By then down_proj has freed its input and the activation function its own; present are the input gradient of the
    # way in and, of a gate, its output and the gradient of what it gates.
    adding = parts.all + stream - 2 * c * inner + c * model.hidden * tokens
    if routed.whole:
        adding = parts.all - parts.mlp + _behind_routed(model, routed, work) + stream
        adding += routed.whole / work.parts + 2 * routed.sent * (1 - 1 / work.parts)
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
        forward=forward - parts.all - stream  # no gradient has entered yet
        if forward and routed.sent < routed.whole and work.recompute == "none"
        else 0.0,
        after_experts=(
            parts.all - parts.mlp + _behind_routed(model, routed, work) + stream + routed.left(work) - shared
            if routed.whole
            else 0.0
        ),
        adding_way_in=adding - shared,
        released=routed.whole + (2 + 1 / work.parts) * routed.inner if routed.inner else 0.0,
        added_ways_in=2 if routed.inner and model.gated else 1,
    )


def _rounding(gradients: float, inputs: float) -> float:
    """The operands of a weight gradient in fp8, and the fp32 copy that the second one is rounded from.

    Counted for the MLP's down_proj alone: nowhere else are so many values rounded while so much is saved.
    """
    return FLOAT8 * (gradients + inputs) + ROUNDED_IN * inputs


def _parts(model: Model, experts: bool, window: bool, work: BlockWorkload) -> KeptTensors:
    c, tokens, stack = work.compute, work.tokens, work.stack
    has_input = model.norm == "layer" or stack.norms == "fused" or c >= 4
    norm = norm_keeps(model, work) * work.stream
    entered = c * model.hidden * (work.stream if stack.regathers else tokens)
    if model.parallel_residual and has_input:
        norm -= c * model.hidden * work.stream / 2  # both norms save the same input
    read = entered
    if work.trained is not None:
        # Frozen projections do not save their input.
        if not {"q_proj", "k_proj", "v_proj"} & work.trained:
            entered = 0.0
        if not {"gate_proj", "up_proj"} & work.trained:
            read = 0.0
    inner, values, routed = _mlp(model, experts, work)
    if routed.whole and work.sp:
        # The router saves this rank's tokens; only shared experts read all tokens of the group.
        read = c * model.hidden * (work.stream + (tokens if routed.shared else 0))
    if work.trained is not None and "down_proj" not in work.trained:
        values -= c * inner
    dropout = 2 * model.hidden * work.stream if work.dropout or stack.dropout else 0.0
    return KeptTensors(
        norm=norm,
        output_norm=norm if model.output_norms else 0.0,
        entered=entered,
        read=read,
        attention=attention_keeps(model, window, work) + turned_copy(model, window, work),
        mlp=values,
        dropout=dropout,
        has_input=has_input,
    )


def norm_keeps(model: Model, work: BlockWorkload) -> float:
    """Bytes per token that a norm on the residual stream saves, without its output."""
    if model.norm == "layer":
        return work.compute * model.hidden + 8
    return _norm(model.hidden, work, model.norm_offset)


def norm_backward(model: Model, work: BlockWorkload) -> float:
    """Peak of a norm's backward pass. Operator by operator: its input, and five tensors of that width."""
    if model.norm == "rms" and work.stack.norms == "eager":
        return (6 * work.wide * model.hidden + work.wide) * work.stream
    return (norm_keeps(model, work) + 2 * work.compute * model.hidden) * work.stream


def _norm(width: int, work: BlockWorkload, offset: bool = False) -> float:
    """Bytes per token that an RMS norm saves, without its output.

    Operator by operator: the input in at least fp32 (a copy, unless it is that wide already), 1 / root mean square,
    and the scaled input in the compute precision, which only the weight gradient needs; with an offset it is as wide
    as the input, because it is rounded later. Fused: input and scale.
    """
    if work.stack.norms == "fused":
        return work.compute * width + 4
    scaled = (work.wide if offset else work.compute) * width if work.adapters is None and work.norms else 0
    return work.wide * (width + 1) + scaled


def projected_widths(model: Model, tp: int) -> tuple[int, int, int]:
    """A tensor rank's features of queries, of keys and of values."""
    if model.latent is not None:
        heads = even_share(model.heads, tp)
        query = heads * (model.latent.nope_dim + model.latent.rope_dim)
        return query, query, heads * model.latent.value_dim
    key = even_share(model.kv_heads, tp) * model.head_dim
    return even_share(model.heads, tp) * model.head_dim, key, key


def attention_keeps(model: Model, window: bool, work: BlockWorkload) -> float:
    """Bytes saved by attention itself, after its projections, without the copy of its output that o_proj reads."""
    c, stack = work.compute, work.stack
    query, key, value = projected_widths(model, work.tp)
    heads, normed = even_share(model.heads, work.tp), query + key
    varlen = _by_token(model, window, work)
    if work.context == "ulysses" and model.latent is None:
        key = value = max(key, work.cp * model.head_dim)  # at least one head for every context rank
    if model.latent is None:
        if repeats_keys(c) and not varlen:
            key = value = query
        kept: float = c * (query + key + value + query) + 4 * heads  # queries, keys, values, output, ln Σ exp
        if stack.joined and model.positions == "rotary":
            kept += c * (query + key)  # rotated queries and keys are copies
    else:
        latent = model.latent
        # Values are padded to the width of queries and keys, so the output is too; o_proj reads the part without
        # padding.
        kept = c * (4 * query + value) + 4 * heads
        kept += _norm(latent.kv_rank, work) + c * latent.kv_rank
        if latent.q_rank is not None:
            kept += _norm(latent.q_rank, work) + c * latent.q_rank
    if model.qk_norm:
        kept += _norm(normed, work, model.norm_offset) + work.wide * (
            heads + even_share(model.kv_heads, work.tp) - 1
        )
    if stack.attention == "unfused":
        kept += (2 * c + 1) * heads * work.seq  # scores, scores after dropout, and the dropout mask
    return kept * work.tokens


def _by_token(model: Model, window: bool, work: BlockWorkload) -> bool:
    """Whether the kernel saves no scores, shares keys in every precision and lays its output out by token: the kernels
    for windows, rings and capped scores."""
    own = window or work.context == "ring" or model.attention_cap is not None
    return own and work.stack.attention == "flash" and model.latent is None


def turned_copy(model: Model, window: bool, work: BlockWorkload) -> float:
    """The copy that restores token order: for several heads, or for heads from other context ranks."""
    query, *_ = projected_widths(model, work.tp)
    by_head = work.stack.kernel == "fused" and not answers_by_token(work.cpu, work.compute)
    turned = (work.cpu or by_head) and not _by_token(model, window, work) and model.positions == "rotary"
    turned = turned and even_share(model.heads, work.tp) > 1
    read = work.trained is None or "o_proj" in work.trained
    copied = (turned or work.context == "ulysses") and model.latent is None and read
    return float(work.compute * query * work.tokens) if copied else 0.0


def _mlp(model: Model, experts: bool, work: BlockWorkload) -> tuple[float, float, RoutedTokens]:
    """Elements of one inner tensor; bytes saved by the whole MLP; and of these, the routed copies of tokens."""
    c, fused = work.compute, work.stack.activation == "fused"
    # Gate, its activation, up, their product; without a gate: up and its activation. Fused: the activation is
    # recomputed.
    tensors = (3 if fused else 4) if model.gated else (1 if model.activation == "relu" else 2)
    if not experts or model.experts is None:
        inner = work.tokens * even_share(model.ffn, work.tp)
        return inner, tensors * c * inner, RoutedTokens()
    found = model.experts
    copies = work.tokens * found.active
    of_shared = work.tokens * even_share(found.shared_ffn, work.tp)
    of_routed = copies * even_share(found.ffn, work.tp)
    kept: float = c * (tensors * of_shared + (2 if work.stack.gates_again else tensors) * of_routed)
    routed = routed_tokens(model, found, work, float(tensors * c * of_shared))
    kept += routed.whole + routed.returned + routing_keeps(found, work)
    return of_routed + of_shared, kept, routed


def routed_tokens(model: Model, found: Experts, work: BlockWorkload, shared: float) -> RoutedTokens:
    """Tokens as their experts read them, and the experts' outputs if the routing weights' gradient needs them."""
    copies, again = work.tokens * found.active, work.stack.gates_again
    whole = float(work.compute * model.hidden * copies)
    sent = whole / work.tp if work.ep > 1 else whole
    crossed = work.compute * (model.hidden / work.tp + 2 * found.active) * work.crossed
    returned = 0.0 if again and work.ep == 1 else sent
    inside = float(work.compute * copies * even_share(found.ffn, work.tp)) if again else 0.0
    return RoutedTokens(whole, returned, inside, sent, shared, crossed)


def routing_keeps(found: Experts, work: BlockWorkload) -> float:
    """What the router saves, and the indices that place each token's copies."""
    c, copies = work.compute, work.tokens * found.active
    # Scores of all experts; for the active ones: indices, weights before they are normalised, and weights as used; and
    # positions after sorting, by expert, and with ``ep`` also by rank.
    chosen = work.wide if found.normalized else 0
    scores = (work.wide * found.count + chosen + (chosen + 8) * found.active) * work.stream
    if work.nodes == 1:
        scores += (c + (32 if work.ep > 1 else 16)) * copies
    else:
        # Sorted by node, and what was received sorted by expert; per received token and active expert, the weight and
        # the position.
        scores += (16 + (16 if work.ep > work.nodes else 0)) * copies
        scores += (8 + (8 + c) * found.active) * work.crossed
    return float(scores)


def _selected(
    model: Model, parts: KeptTensors, inner: float, routed: RoutedTokens, work: BlockWorkload
) -> tuple[float, float]:
    """Bytes that selective recomputation saves besides the input, and how many of them ``parts`` counts as well."""
    c, tokens = work.compute, work.tokens
    query, key, value = projected_widths(model, work.tp)
    gates = inner * (2 if model.gated else 1)
    if work.stack.selective == "scores":
        scores = (2 * c + 1) * even_share(model.heads, work.tp) * work.seq * tokens
        kept = parts.all - (scores if work.stack.attention == "unfused" else 0.0)
        return kept, kept
    if work.stack.selective == "norms":
        own = c * model.hidden * work.stream
        kept = parts.all - parts.entered - own - (own if parts.has_input else 0.0)
        return kept, kept
    if work.stack.selective == "half":
        # Every second of q, k, v, o, gate, up, down: q, v, gate, down; and attention's output.
        used = c * tokens * (query + value + query) + inner
        return used + c * tokens * model.hidden, used
    products = c * tokens * (query + key + value + model.hidden) + gates
    if routed.whole and model.experts:
        products += work.wide * model.experts.count * work.stream  # the router's logits
    # Each saved product is freed as it is used. The last one stays, unless a norm behind it or the return of the
    # experts' tokens uses it.
    last = routed.whole or c * tokens * model.hidden
    used = model.output_norms or routed.whole
    return products + last, products + (last if used else 0.0)


def in_mixing(
    model: Model,
    kept: float,
    stream: float,
    gathered: float,
    routed: RoutedTokens,
    work: BlockWorkload,
) -> float:
    """Backward through the weighted sum of the experts' outputs: each output times the entering gradient, once per
    active expert.

    Shared experts, computed first, still hold all their tensors. With features split over tensor ranks, those of all
    ranks are then gathered and reordered.
    """
    read = work.compute * model.hidden * work.tokens
    before = kept + stream
    if routed.sent < routed.whole:
        return before + max(read / work.tp + 2 * routed.sent + routed.crossed, 2 * routed.whole / work.parts)
    return before + gathered + (2 * routed.sent if routed.returned else routed.whole) + routed.crossed


def in_computing(model: Model, kept: float, routed: RoutedTokens, work: BlockWorkload) -> float:
    """Peak of the forward pass: as the outputs of experts on other ranks are sent back.

    Tokens as received, from other nodes too, and as grouped by expert; the outputs, and with features split over tensor
    ranks a copy of those in rank order and the sum; of the other part of the tokens, what is in transit. All of the
    block's tokens are still alive: its input, attention's output and their sum. 0 if all experts are here.
    """
    if work.ep == 1:
        return 0.0
    stream = work.compute * model.hidden * work.stream
    gathered = work.compute * model.hidden * work.tokens if work.sp and not routed.shared else 0.0
    of_shared = work.compute * model.hidden * work.tokens if routed.shared else 0.0  # shared experts' output
    copies = 2 * routed.whole if routed.sent < routed.whole else 0.0
    arrived = (
        (copies + 3 * routed.sent) / work.parts + 2 * routed.sent * (1 - 1 / work.parts) + routed.crossed
    )
    return kept - routed.returned + of_shared + gathered + 3 * stream + arrived


def _behind_routed(model: Model, routed: RoutedTokens, work: BlockWorkload) -> float:
    """What shared experts, whose backward pass comes after that of the routed, still hold: their tensors, and the
    gradient of their output if it was gathered."""
    gathered = work.compute * model.hidden * work.tokens if work.sp else 0.0
    return routed.shared + gathered if routed.shared else 0.0


def _working(
    model: Model,
    parts: KeptTensors,
    stream: float,
    inner: float,
    mlp: float,
    routed: RoutedTokens,
    work: BlockWorkload,
) -> tuple[BlockPeak, ...]:
    """The block's own tensors and gradients at each candidate peak of the backward pass, in time order."""
    c, tokens = work.compute, work.tokens
    query, key, value = projected_widths(model, work.tp)
    ways_in = 2 if model.gated else 1
    # The MLP's dropout comes first, so its mask is freed.
    held = parts.all - parts.dropout / 2 - parts.output_norm
    after_mlp = held - mlp - parts.read - parts.norm
    # The way in: the input gradients of gate_proj and up_proj, still separate; experts have them as one projection, and
    # of one part of the tokens.
    entering = inner + ways_in * (routed.whole or c * model.hidden * tokens) + routed.whole
    if routed.inner:
        entering = (ways_in * inner + routed.whole) / work.parts + routed.entering(work)
    left = held - mlp + _behind_routed(model, routed, work) + stream
    entered = [BlockPeak(left + entering, 1 + ways_in)]
    if routed.whole and work.parts > 1:
        # Weight gradients of the last part of the tokens; those of the previous part wait, and are then added.
        added = entering - (ways_in * inner + routed.whole) / work.parts
        entered = [
            entered[0]._replace(waiting=ways_in),
            BlockPeak(left + added, 1 + ways_in, waiting=ways_in, added=ways_in),
        ]
    later = (
        # The second norm, after the MLP's tensors are freed. In one precision, the stream's two gradients are the same
        # tensor.
        after_mlp + norm_backward(model, work) + (stream if work.wide > c else 0.0),
        # The norm behind attention. The stream has a gradient of its own.
        after_mlp - parts.output_norm + (norm_backward(model, work) + stream if model.output_norms else 0.0),
        # Attention: gradients of its output, queries, keys and values.
        after_mlp - parts.output_norm + stream + c * tokens * (query + query + key + value),
    )
    # By then o_proj has its weight gradient too.
    ways_out = query / even_share(model.ffn, work.tp)
    shared = [
        BlockPeak(
            after_mlp - parts.output_norm + stream + moment.activations,
            1 + ways_in + ways_out,
            moment.buffers,
        )
        for moment in (context.moments(query, key, value, work) if work.context else ())
    ]
    # The activation function: the gradients of its two factors; their product's gradient has been freed.
    activation = [BlockPeak(held - routed.returned + stream + ways_in * inner, 1)]
    if routed.inner:
        # For experts: before their first weight gradient, which needs the product and the gradient of their outputs.
        before = held - routed.returned + stream + routed.entering(work)
        activation = [BlockPeak(before + 4 * routed.inner / work.parts, 0)]
        if work.parts > 1:
            # Of the last part: the previous one's tensors are gone, and its weight gradients wait. At its own first
            # gradient, that of the product is gone.
            before -= (routed.whole + ways_in * routed.inner) * (1 - 1 / work.parts)
            activation += [
                BlockPeak(before + 4 * routed.inner / work.parts, 0, waiting=1 + ways_in),
                BlockPeak(before + 3 * routed.inner / work.parts, 1, waiting=1 + ways_in),
            ]
    # The first norm, with nothing else of the block left and all its weight gradients computed.
    end = norm_backward(model, work) + (stream if work.wide > c else 0.0)
    found = *activation, *entered, BlockPeak(max(later), 1 + ways_in), *shared, BlockPeak(end, None)
    if not model.output_norms:
        return found
    return BlockPeak(held + norm_backward(model, work) + stream, 0), *found
