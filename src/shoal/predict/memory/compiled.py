"""Activation memory of a compiled block: what it keeps is a list (``facts/layout/kept.py``), what it adds is reasoned.

One call computes the whole backward pass. It lets go of what was kept as soon as that is used for the last time, and
writes a gradient in the place of an equally large tensor that it has just used up. Its fullest moments, with g the
gradient that enters:

    activation   g, the MLP's product made anew for its weight's gradient, and that product's own gradient; those of
                 gate and up come in the place of gate and up
    ways in      g, the second norm's result made anew, and what each way into the MLP makes of its gradient
    attention    g, the MLP's tensors gone; gradients of attention's result, of queries, keys and values, and the result
                 once more as o_proj reads it
    first norm   g and the block's input; the norm's result made anew, and what each of q, k and v makes of its gradient

With ``full`` everything is made anew first, and ``selective`` makes attention's result anew before its gradients. The
resting bytes are tested against compiled blocks; peaks were held against an H200 (docs/accuracy.md).
"""

from __future__ import annotations

from shoal.facts.cluster.attention_kernels import repeats_keys
from shoal.facts.layout import Recompute
from shoal.facts.layout.buckets import even_share
from shoal.facts.layout.kept import (
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
    """One dense block of which all weights are trained."""
    c, tokens = work.compute, work.tokens
    resting, everything = (sum(_kept(model, work, kind).values()) for kind in (work.recompute, "none"))
    places = _kept(model, work, "none")
    stream, whole = c * model.hidden * work.stream, c * model.hidden * tokens
    gathered = whole if work.sp else 0.0  # the gradient that enters, of all tokens
    inner = c * tokens * even_share(model.ffn, work.tp)
    query = c * tokens * even_share(model.heads, work.tp) * model.head_dim
    key = query if repeats_keys(c) else c * tokens * even_share(model.kv_heads, work.tp) * model.head_dim
    ways_in = 2 if model.gated else 1
    # What is there of the list when the MLP's backward pass begins, and when attention's does.
    there = everything if work.recompute == "full" else resting
    mlp = sum(places.get(place, 0.0) for place in (GATE, UP, GATHERED[1], OUT, DOWN))
    # What is made anew is read by the same kernel that writes its gradient, to a place of its own.
    anew = 2 * inner + 2 * whole if work.recompute == "full" else 0.0
    activation = there + stream + gathered + 2 * inner + anew
    entering = there + stream + (0.0 if work.sp else whole) + ways_in * whole
    attention = everything - mlp + stream + query + (query + 2 * key) + query
    first_norm = places[INPUT] + stream + (0.0 if work.sp else whole) + 3 * whole
    here = even_share(model.kv_heads, work.tp) * model.head_dim
    moments = context.moments(query // (c * tokens), here, here, work) if work.context else []
    # The way out of attention has its weight's gradient by then.
    ways_out = query / inner
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
        rounding=0.0,  # its kernels round as they read
        inner=inner,
        put_off=inner + gathered,
        deferred=0.0,  # schedules that split a backward pass run eager
        held_input=True,
        reads_input=True,
    )


def _kept(model: Model, work: BlockWorkload, kind: Recompute) -> dict[str, float]:
    """Bytes of a micro-batch, by place."""
    kept = {
        one.place: one.bytes * (work.stream if one.of_stream else work.tokens)
        for one in kept_tensors(model, kind, work.compute, work.tp, work.sp)
    }
    if work.context == "ulysses" and kind != "full":
        # Attention's result as it came back from other ranks, which the way out reads.
        kept[RETURNED] = kept[QUERIES]
    elif work.context == "ring" and kind == "selective":
        # Attention is not repeated: that would send again.
        kept |= {
            place: size for place, size in _kept(model, work, "none").items() if place in (ATTENDED, LOG_SUM)
        }
    return kept
