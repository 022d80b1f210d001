"""Activation memory of a compiled block. What it saves is an exact list (``facts/layout/saved_activations.py``); what
its backward pass adds on top is derived here.

One call computes the whole backward pass. It frees each saved tensor after its last use and reuses the memory of a
tensor it has just consumed for a gradient of the same size. The candidate peaks, with g the gradient that enters the
block:

    activation   g, the MLP product recomputed for its weight gradient, and that product's own gradient; the
                 gradients of gate and up overwrite gate and up
    ways in      g, the second norm's output recomputed, and one input gradient from each of gate_proj and up_proj
    attention    g, after the MLP's tensors are freed; gradients of attention's output, of queries, keys and values, and
                 the output once more as o_proj reads it
    first norm   g and the block's input; the norm's output recomputed, and one input gradient from each of q, k and v

A split backward pass keeps each projection's input and output gradient, so that the fullest moment may come last.
``full`` recomputes everything first; ``selective`` recomputes attention's output before its gradients. Tests compare
the saved bytes with compiled blocks; peaks were checked on an H200 (docs/accuracy.md).
"""

from __future__ import annotations

from shoal.facts.cluster.attention_kernels import repeats_keys
from shoal.facts.layout import Recompute
from shoal.facts.layout.buckets import even_share
from shoal.facts.layout.saved_activations import (
    ATTENDED,
    DOWN,
    GATE,
    GATHERED,
    INPUT,
    LOG_SUM,
    OUT,
    QUERIES,
    UP,
    kept_tensors,
)
from shoal.facts.model import Model
from shoal.predict.memory import context
from shoal.predict.memory.block_workload import BlockActivations, BlockPeak, BlockWorkload

RETURNED = "attention result of all heads"


def compiled_activations(model: Model, work: BlockWorkload) -> BlockActivations:
    """A dense block with all weights trained."""
    c, tokens = work.compute, work.tokens
    resting, everything = (sum(_kept(model, work, kind).values()) for kind in (work.recompute, "none"))
    places = _kept(model, work, "none")
    stream, whole = c * model.hidden * work.stream, c * model.hidden * tokens
    gathered = whole if work.sp else 0.0  # the entering gradient, all-gathered over tokens
    inner = c * tokens * even_share(model.ffn, work.tp)
    query = c * tokens * even_share(model.heads, work.tp) * model.head_dim
    key = query if repeats_keys(c) else c * tokens * even_share(model.kv_heads, work.tp) * model.head_dim
    ways_in = 2 if model.gated else 1
    # Saved tensors still alive when the MLP's backward pass begins, and when attention's does.
    there = everything if work.recompute == "full" else resting
    mlp = sum(places.get(place, 0.0) for place in (GATE, UP, GATHERED[1], OUT, DOWN))
    # A recomputed tensor is read by the same kernel that writes its gradient, so the gradient needs memory of its own.
    anew = 2 * inner + 2 * whole if work.recompute == "full" else 0.0
    activation = there + stream + gathered + 2 * inner + anew
    entering = there + stream + (0.0 if work.sp else whole) + ways_in * whole
    attention = everything - mlp + stream + query + (query + 2 * key) + query
    first_norm = places[INPUT] + stream + (0.0 if work.sp else whole) + 3 * whole
    here = even_share(model.kv_heads, work.tp) * model.head_dim
    moments = context.moments(query // (c * tokens), here, here, work) if work.context else []
    # By then o_proj has its weight gradient.
    ways_out = query / inner
    # A split backward pass keeps, for the weight gradients: the two norms' outputs, the gradients of o_proj's and
    # down_proj's outputs, attention's output; the gradients of queries, keys and values; those of gate and up, and the
    # MLP product.
    projected = query + 2 * c * tokens * even_share(model.kv_heads, work.tp) * model.head_dim
    deferred = 4 * whole + query + projected + (ways_in + 1) * inner
    # At each of the moments above: its size, and what would be gone by then if nothing were kept.
    split = (
        (activation, 0.0),
        (entering, inner + gathered),
        (attention, (ways_in + 1) * inner + 2 * whole),
        (first_norm, deferred - whole),
    )
    put_off = max(size + kept for size, kept in split) - max(size for size, _ in split)
    return BlockActivations(
        resting=resting,
        working=(
            BlockPeak(activation - resting, 1),
            BlockPeak(max(entering, attention) - resting, 1 + ways_in),
            *(
                BlockPeak(
                    everything - mlp + stream + one.activations - resting, 1 + ways_in + ways_out, one.buffers
                )
                for one in moments
            ),
            BlockPeak(first_norm - resting, None),
        ),
        opening=there + stream + gathered + inner - resting,
        rounding=0.0,  # its kernels round operands as they read them
        inner=inner,
        put_off=put_off,
        deferred=deferred,
        held_input=True,
        reads_input=True,
    )


def _kept(model: Model, work: BlockWorkload, kind: Recompute) -> dict[str, float]:
    """Bytes saved per micro-batch, by place in the block."""
    kept = {
        one.place: one.bytes * (work.stream if one.of_stream else work.tokens)
        for one in kept_tensors(model, kind, work.compute, work.tp, work.sp)
    }
    if work.context == "ulysses" and kind != "full":
        # Attention's output as received from the other context ranks, which o_proj reads.
        kept[RETURNED] = kept[QUERIES]
    elif work.context == "ring" and kind == "selective":
        # Ring attention is not recomputed, since that would repeat its communication.
        kept |= {
            place: size for place, size in _kept(model, work, "none").items() if place in (ATTENDED, LOG_SUM)
        }
    return kept
