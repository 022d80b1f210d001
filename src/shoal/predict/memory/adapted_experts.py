"""Activation memory of a block with adapters and routed experts, which are frozen.

Frozen experts keep nothing that they read: what gate and up gave, which their gradients need, and those of the tokens'
weights; where experts are on other ranks, for these what came back. Weights always have a gradient, for the routers'
tally is there (``models/router.py``); tokens have one where anything before them is trained. In the backward pass the
experts that every token uses come last. Of experts in 4 bits one stack at a time is there as it is used.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.layout.buckets import even_share
from shoal.facts.model import Adapters, Experts, Model
from shoal.predict.memory.activations import (
    RoutedTokens,
    in_mixing,
    routed_tokens,
    routing_keeps,
)
from shoal.predict.memory.adapted import (
    INTO_MLP,
    AdaptedParts,
    around,
    attention_moments,
    attention_parts,
    attention_products,
    mlp_parts,
    multiplied,
    projection_names,
    read_in_attention,
    unpacked_bytes,
    what_is_read,
)
from shoal.predict.memory.block_workload import BlockActivations, BlockPeak, BlockWorkload

WAYS_IN = 2  # experts have a gate
GROUPED_WIDTH = 2  # bytes of bf16, which torch's grouped product takes


@lru_cache(maxsize=65536)
def adapted_experts(
    model: Model, experts: Experts, window: bool, entry: bool, adapters: Adapters, work: BlockWorkload
) -> BlockActivations:
    """One block. ``entry``: nothing before it is trained."""
    c, tokens = work.compute, work.tokens
    has = set(adapters.targets).__contains__
    stream, whole = c * model.hidden * work.stream, float(c * model.hidden * tokens)
    inner = float(c * tokens * experts.active * even_share(experts.ffn, work.tp))
    of_shared = float(c * tokens * even_share(experts.shared_ffn, work.tp)) if experts.shared else 0.0
    narrow = float(c * adapters.rank * tokens) * sum(map(has, projection_names(model, True)))

    attention, _, streamed = attention_parts(model, window, entry, adapters, work)
    shared_mlp = product = 0.0
    if experts.shared:
        shared_mlp, product = mlp_parts(model, experts.shared_ffn, adapters, work, streamed)
        shared_mlp += multiplied(model, True, adapters, work, "shared_experts")
    routed = routed_tokens(model, experts, work, shared_mlp)
    # What gate and up gave, where tokens or, as part of the way out's input, their weights have a gradient.
    own = WAYS_IN * inner * (streamed or work.ep == 1)
    of_routed = own + routed.returned + routing_keeps(experts, work)
    kept = around(
        model,
        entry,
        streamed,
        work,
        attention + multiplied(model, True, adapters, work, "self_attn"),
        shared_mlp + of_routed,
        product,
    )
    gathered = whole if work.sp else 0.0
    if work.recompute == "none":
        resting, shared = kept.all, kept.all
    else:
        resting, shared = stream, stream if kept.has_input else 0.0
        if work.recompute == "selective":
            products = attention_products(model, True, work) + narrow
            products += WAYS_IN * (inner + of_shared) + routed.whole + (whole if experts.shared else 0.0)
            resting, shared = resting + products, shared + products
    mixing = in_mixing(model, kept.all, stream, gathered, routed, work)
    forward, again = _in_forward(model, experts, adapters, kept, routed, inner, work)
    if work.recompute != "none":
        mixing = max(mixing, kept.all + again)
    moments = [BlockPeak(mixing, 0)]
    if gathered and work.rows > 1 and work.recompute == "none":
        moments.insert(0, BlockPeak(kept.all + stream + 2 * gathered, 0))
    held = kept.all - kept.dropout / 2
    unpacked = _unpacked(model, experts, adapters, work)
    after_mixing = held - routed.returned + stream + gathered + routed.whole
    # The way out: the gradient of its input; with that those of gate and up, and the input, made again.
    leaving = after_mixing + inner + max(unpacked, (WAYS_IN + 1) * inner) if own else 0.0
    if own:
        moments.append(BlockPeak(leaving, 1))
    if streamed:
        # The way in: what it read has a gradient, where there is no grouped product put together of parts.
        into = held - of_routed + stream + gathered + WAYS_IN * inner + _parts(routed.whole, work)
        moments.append(BlockPeak(into + WAYS_IN * unpacked, 1))
    moments += _shared(adapters, experts, kept, held - of_routed, stream, whole, of_shared, model, work)
    after_mlp = held - kept.mlp - kept.second_norm
    moments += attention_moments(model, kept, after_mlp, after_mlp, WAYS_IN, stream, work)
    deferred = read_in_attention(model, adapters, work) + narrow
    if experts.shared:
        deferred += what_is_read(adapters, INTO_MLP, c, whole, False) + of_shared * has("down_proj")
    opening = (
        leaving + kept.dropout / 2 if own else kept.all - routed.returned + stream + gathered + routed.whole
    )
    return BlockActivations(
        resting=resting,
        working=tuple(moment._replace(bytes=moment.bytes - shared) for moment in moments),
        opening=opening - shared,
        inner=inner,
        rounding=0.0,
        put_off=of_shared * has("down_proj"),
        deferred=deferred,
        held_input=work.recompute != "none" or (kept.has_input and not entry),
        reads_input=kept.has_input,
        forward=forward if work.recompute == "none" else 0.0,
    )


def _in_forward(
    model: Model,
    experts: Experts,
    adapters: Adapters,
    kept: AdaptedParts,
    routed: RoutedTokens,
    inner: float,
    work: BlockWorkload,
) -> tuple[float, float]:
    """The fullest moment of a forward pass, beyond what is kept; and of one that is repeated, which ends with what the
    experts made of their tokens.

    Functions that have not returned still know what they were given: the block's input; the stream after attention,
    and that normed, of all tokens too; what shared experts made of these; tokens in the order of their experts.
    """
    stream, whole = (work.compute * model.hidden * count for count in (work.stream, work.tokens))
    keeps_read = experts.shared and not adapters.dropout and any(one in adapters.targets for one in INTO_MLP)
    beside = whole if experts.shared else 0.0
    known = routed.whole + beside + (0.0 if keeps_read else whole)
    known += (0.0 if kept.has_input else stream) + (stream if work.sp else 0.0)
    # The way out: what it reads, and what it gives; before, as the first is made, the second only where it was kept.
    result = routed.whole - routed.returned
    product = known + inner + _parts(routed.whole, work) - routed.returned
    product += _unpacked(model, experts, adapters, work)
    if work.recompute == "selective":
        product = max(product, known + 2 * inner + result)
    entered = stream
    if work.tp > 1 and work.ep > 1:
        # Tokens as they came and in order; results of all ranks' features, and a copy in the order of ranks.
        moment = known + 2 * routed.whole + 2 * routed.sent + routed.crossed
        moment = max(moment, product + routed.whole + 2 * routed.sent)
        forward, entered = moment, stream + whole / work.tp + (beside if work.sp else 0.0)
    elif work.ep > 1:
        forward = moment = max(known + 2 * routed.sent + routed.crossed, product + routed.sent)
    elif work.tp > 1:
        moment = known + whole + result  # added up
        # As it leaves, with what shared experts made of it; in the order of ranks.
        leaving = known + whole + beside + (stream if work.sp else whole)
        forward = max(product, leaving + (whole if work.sp and work.rows > 1 else 0.0))
        moment = max(moment, product)
        entered = stream + (whole if work.sp else 0.0)
    else:
        moment = forward = max(product, known + whole + result)
    return forward + (0.0 if kept.has_input else stream), moment + entered


def _parts(made: float, work: BlockWorkload) -> float:
    """What a product of each expert's tokens makes; where there is no grouped one, also its parts."""
    return made if work.compute == GROUPED_WIDTH else 2 * made


def _unpacked(model: Model, experts: Experts, adapters: Adapters, work: BlockWorkload) -> float:
    """In 4 bits: one matrix of each expert here, as it is used. Gates and ups are used together."""
    if adapters.base != "nf4":
        return 0.0
    each = even_share(experts.ffn, work.tp) * model.hidden
    return float(work.compute * (experts.count // work.ep) * each)


def _shared(
    adapters: Adapters,
    experts: Experts,
    kept: AdaptedParts,
    held: float,
    stream: float,
    whole: float,
    inner: float,
    model: Model,
    work: BlockWorkload,
) -> list[BlockPeak]:
    """Of experts that every token uses, beside the gradient that routed ones have made of what all of them read."""
    if not experts.shared or not kept.streamed:
        return []
    there = held + stream + whole + (whole if work.sp else 0.0)
    last = max(whole, unpacked_bytes(model, True, adapters, work, "up_proj", whole))
    return [
        BlockPeak(there - kept.product + (1 + WAYS_IN) * inner, 1),
        BlockPeak(there - kept.product - (WAYS_IN + 1) * inner + inner + whole + last, 1 + WAYS_IN),
    ]
