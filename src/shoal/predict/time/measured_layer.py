"""Time of Shoal's own layers on a calibrated device: every operator at its measured rate.

``predict/time/operators.py`` lists the operators that only move bytes.
"""

from __future__ import annotations

from shoal.facts.cluster.stack import SHOAL
from shoal.facts.logits import tokens_at_once
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.predict.flops import attention_flops, attention_kinds
from shoal.predict.time import operators, ring
from shoal.predict.time.compiled_operators import compiled_block, compiled_dropout
from shoal.predict.time.kernels import LayerProduct
from shoal.predict.time.layer import (
    FREE,
    NONE,
    LayerShare,
    Passes,
    Seconds,
    WeightStorage,
    WeightTraffic,
    added_by_part,
    capped_attention,
    head_widths,
    kept,
    merging,
    moved_beside,
    products,
    tokens_of,
)
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.operators import NOTHING, Widths
from shoal.predict.workload import Workload

# torch's 16-to-32-bit copy kernel uses memory less well than those that keep or halve the width: 1.8 of 4.3 TB/s on an
# H200.
WIDENING = 2.4


def handling(
    widths: Widths, recipe: Recipe, rests: WeightStorage, micro_batches: int, narrow: bool = False
) -> Passes:
    """Bytes moved per parameter and micro-batch. The first micro-batch's gradients have nothing to be added to.

    A gradient is widened to its parameter's state, unless it stays in the compute precision (``narrow``). A parameter
    wider than its state is cast on use.
    """
    if rests == "gathered" or (narrow and widths.compute < widths.states):
        return NONE
    if rests == "kept":
        return kept(recipe, micro_batches, WIDENING)
    each = float(widths.states + widths.compute) if widths.casts else 0.0
    ahead = each if widths.compute > widths.states else 0.0
    if widths.compute < widths.states:
        each *= WIDENING
    return Passes(ahead, each + 3 * widths.states * (micro_batches - 1) / micro_batches)


def layer(model: Model, kernels: MeasuredKernels, share: LayerShare) -> Seconds:
    """One layer, one micro-batch."""
    found = products(model, share)
    seconds = [kernels.ways(one, share.compiled) for one in found]
    forward, inputs, weights = (sum(way) for way in zip(*seconds, strict=True))
    last, count = seconds[-1][0], sum(one.times for one in found)
    dense, experts = share.held
    by_part = added_by_part(share, kernels.widths.compute)
    held = moved_beside(found, WeightTraffic(dense, experts._replace(backward=experts.backward + by_part)))
    attend, attend_back = attention(model, kernels, share)
    block = compiled_block if share.compiled else operators.block
    moved = block(model, tokens_of(model, share), _at_use(kernels, share.held.dense))
    cast, cast_back = (kernels.works(operators.matrices(count, size, 1.0)) if size else 0.0 for size in held)
    dropped, features = NOTHING, 2 * share.between * model.hidden
    if share.dropout:
        dropped = (
            compiled_dropout(features) if share.compiled else operators.dropout(features, kernels.widths)
        )
    whole = forward + attend + kernels.works(moved.forward) + kernels.works(dropped.forward) + cast
    # Recomputation ends before the last product, whose output no gradient needs except that of a norm behind it.
    again = whole - kernels.works(moved.last)
    return Seconds(
        whole,
        inputs + attend_back + kernels.works(moved.backward) + kernels.works(dropped.backward),
        weights + cast_back,
        # A compiled pass recomputes elementwise results where it reads them.
        attend if share.compiled else again - forward,
        again if model.output_norms else again - last,
    )


def attention(model: Model, kernels: MeasuredKernels, share: LayerShare) -> tuple[float, float]:
    """Seconds of attention forward and backward, averaged over the model's layers."""
    query, key = head_widths(model, share.tp)
    length = ring.turn_length(share.seq, share.turns)
    shape = model.head_dim, query // model.head_dim, key // model.head_dim, length, share.sequences
    # A measurement at a ring step's length includes the kernel's start and end.
    longer = 1.0 if kernels.attends else ring.shorter(share.seq, share.turns)
    total = [0.0, 0.0]
    for layer, windowed, part in attention_kinds(model, share.seq):
        flops = share.tokens * attention_flops(model, layer, share.seq) / share.tp
        forward, backward = kernels.attended(shape, flops, flash=windowed or share.turns > 1)
        found = longer * forward, longer * backward
        if model.attention_cap is not None:
            found = capped_attention(model, kernels, flops, windowed)
        for way, seconds in enumerate(found):
            total[way] += part * seconds
    more = merging(model, SHOAL, kernels, share)
    return total[0] + more[0], total[1] + more[1]


def head(
    model: Model,
    kernels: MeasuredKernels,
    tokens: int,
    rows: int,
    held: Passes,
    compiled: bool,
    once: bool,
) -> Seconds:
    """Every chunk of tokens has three products of its own, all in the forward pass.

    ``once``: one kernel covers the logits of the whole vocabulary.
    """
    hidden, taken = model.hidden, min(tokens, tokens_at_once(rows))
    loss = operators.LOSS_AT_ONCE if once and rows == model.vocab else operators.LOSS
    moved = operators.head(model, tokens, rows, _at_use(kernels, held), loss)
    each = sum(kernels.ways(LayerProduct(taken, hidden, rows, 1), compiled))
    added = operators.matrices(1, rows * hidden, held.backward - held.forward)
    forward = tokens / taken * each + kernels.works(moved.forward)
    return Seconds(forward, kernels.works(moved.backward), kernels.works(added), 0.0, 0.0)


def embedding(
    model: Model, kernels: MeasuredKernels, tokens: int, rows: int, held: Passes, tied_here: bool
) -> Seconds:
    """``tied_here``: the head's gradient belongs to this matrix too, and is stored with it."""
    moved = operators.embedding(model, tokens, rows, _at_use(kernels, held), tied_here)
    added = 0.0 if tied_here else held.backward - held.forward
    kept = operators.matrices(1, rows * model.hidden, added)
    weight = kernels.works(moved.backward) + kernels.works(kept)
    return Seconds(kernels.works(moved.forward), 0.0, weight, 0.0, 0.0)


def _at_use(kernels: MeasuredKernels, held: Passes) -> Widths:
    """If nothing is cast on use, parameters come in the compute precision."""
    return kernels.widths if held.forward else kernels.widths._replace(states=kernels.widths.compute)


def by_kind(workload: Workload, kernels: MeasuredKernels) -> dict[str, float]:
    """Device seconds per step without recomputation: matrix products, and attention."""
    model, tokens = workload.model, workload.tokens
    share = LayerShare(tokens, float(tokens), workload.micro, workload.recipe.seq, 1, 1, False, FREE)
    compiled = workload.compiled
    each = sum(sum(kernels.ways(one, compiled)) for one in products(model, share))
    taken = min(tokens, tokens_at_once(model.vocab))
    whole = LayerProduct(taken, model.hidden, model.vocab, 1)
    head = (tokens / taken) * sum(kernels.ways(whole, compiled))
    attended = sum(attention(model, kernels, share))
    return {
        "matrix products": workload.accumulation * (model.layers * each + head),
        "attention": workload.accumulation * model.layers * attended,
    }
