"""Activation memory of a block with adapters and frozen routed experts.

Frozen experts do not save their inputs. They save the outputs of gate and up, which those need for their own gradients
and for the routing weights'; with experts on other ranks, the routing weights need the returned outputs instead.
Routing weights always have a gradient, because the router's load statistics are attached (``models/router.py``);
tokens have one if anything before them is trained. Shared experts come last in the backward pass. 4-bit experts are
unpacked one stack at a time.
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

WAYS_IN = 2  # experts are gated: gate and up
GROUPED_WIDTH = 2  # bytes of bf16, which torch's grouped product needs


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
    # Outputs of gate and up, if tokens have a gradient, or routing weights do as part of down_proj's input.
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
    # down_proj: the gradient of its input, together with those of gate and up, and the recomputed input.
    leaving = after_mixing + inner + max(unpacked, (WAYS_IN + 1) * inner) if own else 0.0
    if own:
        moments.append(BlockPeak(leaving, 1))
    if streamed:
        # gate_proj and up_proj: the gradient of their input, assembled from parts if there is no grouped product.
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
    """Peak of a forward pass beyond what is saved; and of a recomputed one, which ends with the experts' outputs.

    Frames that have not returned still hold their arguments: the block's input; the stream after attention, and its
    norm, also over all tokens; the shared experts' output; the tokens sorted by expert.
    """
    stream, whole = (work.compute * model.hidden * count for count in (work.stream, work.tokens))
    keeps_read = experts.shared and not adapters.dropout and any(one in adapters.targets for one in INTO_MLP)
    beside = whole if experts.shared else 0.0
    known = routed.whole + beside + (0.0 if keeps_read else whole)
    known += (0.0 if kept.has_input else stream) + (stream if work.sp else 0.0)
    # down_proj: its input and output. Before that, as its input is computed, the output exists only if it was saved.
    result = routed.whole - routed.returned
    product = known + inner + _parts(routed.whole, work) - routed.returned
    product += _unpacked(model, experts, adapters, work)
    if work.recompute == "selective":
        product = max(product, known + 2 * inner + result)
    entered = stream
    if work.tp > 1 and work.ep > 1:
        # Tokens as received and sorted; outputs over all ranks' features, and a copy in rank order.
        moment = known + 2 * routed.whole + 2 * routed.sent + routed.crossed
        moment = max(moment, product + routed.whole + 2 * routed.sent)
        forward, entered = moment, stream + whole / work.tp + (beside if work.sp else 0.0)
    elif work.ep > 1:
        forward = moment = max(known + 2 * routed.sent + routed.crossed, product + routed.sent)
    elif work.tp > 1:
        moment = known + whole + result  # summed
        # On leaving the block, with the shared experts' output; reordered by rank.
        leaving = known + whole + beside + (stream if work.sp else whole)
        forward = max(product, leaving + (whole if work.sp and work.rows > 1 else 0.0))
        moment = max(moment, product)
        entered = stream + (whole if work.sp else 0.0)
    else:
        moment = forward = max(product, known + whole + result)
    return forward + (0.0 if kept.has_input else stream), moment + entered


def _parts(made: float, work: BlockWorkload) -> float:
    """Bytes of a product over each expert's tokens; without a grouped product, also of its parts."""
    return made if work.compute == GROUPED_WIDTH else 2 * made


def _unpacked(model: Model, experts: Experts, adapters: Adapters, work: BlockWorkload) -> float:
    """Experts in 4 bits: one unpacked matrix of each expert on this rank. Gate and up are used together."""
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
    """Peaks of the shared experts' backward pass, while the routed experts' input gradient exists."""
    if not experts.shared or not kept.streamed:
        return []
    there = held + stream + whole + (whole if work.sp else 0.0)
    last = max(whole, unpacked_bytes(model, True, adapters, work, "up_proj", whole))
    return [
        BlockPeak(there - kept.product + (1 + WAYS_IN) * inner, 1),
        BlockPeak(there - kept.product - (WAYS_IN + 1) * inner + inner + whole + last, 1 + WAYS_IN),
    ]
