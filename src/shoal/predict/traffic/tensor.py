"""Traffic of tensor parallelism (``tp``, ``sp``): the residual stream, and a little in the loss.

x = tokens of a micro-batch · hidden · compute width. For every micro-batch and the layers of a rank, over ``tp``:

    sp=1  forward    all-gather x into attention, MLP and head; reduce-scatter x out of attention, MLP and embedding
          backward   the mirror image
          recompute  2 all-gathers and a reduce-scatter of x per layer
    sp=0  forward    all-reduce x out of attention, MLP and embedding
          backward   all-reduce x into attention, MLP and head
          recompute  an all-reduce of x per layer
    loss  all-reduce one logit per token, then two, in each of its chunks

Recomputing a block stops once nothing further is needed, which is before its last exchange. Dropout, whose mask comes
after that exchange, and a norm behind the MLP, which reads its result, repeat that one too. A compiled block repeats
only what its gradients need: with ``selective`` nothing, because it saves what it received; with ``full`` the last
exchange only for such a norm, and not attention's results if the MLP does not read them. With ``ep`` a block with
experts has several parts, of which the last runs eager under ``full``. Once per step, the gradients of replicated
parameters are reduced: over the group, and over the ranks that share a key/value head.
"""

from __future__ import annotations

from shoal.facts.logits import tokens_at_once
from shoal.facts.model.parameters import EMBEDDING
from shoal.facts.precision import compute_width, reduce_width
from shoal.predict.collective_call import CollectiveCall, Phase
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.workload import Workload

# The projections of a block: attention's, and its MLP's.
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
SIDES = (("q_proj", "k_proj", "v_proj", "o_proj", *LATENT), ("gate_proj", "up_proj", "down_proj"))


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    layout, recipe = workload.layout, workload.recipe
    if layout.tp == 1:
        return ()
    times, layers = workload.accumulation, here.layers
    stream = workload.tokens * workload.model.hidden * compute_width(recipe)
    keeps = "none", "selective" if workload.compiled else "none"
    again = 0 if layout.recompute in keeps else layers
    entering, leaving = 2 * layers + here.last, 2 * layers + here.first
    entering_back, leaving_back = entering, leaving
    if workload.lora is not None and here.first:
        # A frozen embedding gets no gradient, nor does anything that reads it before the first adapter.
        attention, mlp = (any(one in names for one in workload.lora.targets) for names in SIDES)
        if workload.model.parallel_residual:
            entering_back -= 2
            leaving_back -= 1 + (not attention) + (not mlp)
        else:
            entering_back -= 1 + (not attention)
            leaving_back -= 1 + (not attention)
    elif here.first and recipe.frozen(EMBEDDING):
        leaving_back -= 1  # no gradient continues to a frozen embedding
    behind = workload.model.output_norms  # reads the result of the last exchange
    repeated = 2 * again if recipe.dropout or behind else again
    if workload.compiled and not behind:
        repeated = 0 if workload.model.parallel_residual else again
        if layout.ep > 1 and again and recipe.dropout:
            repeated += here.sparse
    if layout.sp:
        found = [
            CollectiveCall("all_gather", "tp", stream, times * entering, "forward"),
            CollectiveCall("reduce_scatter", "tp", stream, times * leaving, "forward"),
            CollectiveCall("reduce_scatter", "tp", stream, times * entering_back, "backward"),
            CollectiveCall("all_gather", "tp", stream, times * leaving_back, "backward"),
        ]
        if again:
            found.append(CollectiveCall("all_gather", "tp", stream, times * 2 * again, "recompute"))
            found.append(CollectiveCall("reduce_scatter", "tp", stream, times * repeated, "recompute"))
    else:
        found = [
            CollectiveCall("all_reduce", "tp", stream, times * leaving, "forward"),
            CollectiveCall("all_reduce", "tp", stream, times * entering_back, "backward"),
        ]
        if again:
            found.append(CollectiveCall("all_reduce", "tp", stream, times * repeated, "recompute"))
    found += _row_lengths(workload, layers, "forward")
    found += _row_lengths(workload, again, "recompute")
    if here.last:
        found += _loss(workload)
    return tuple(found)


def _row_lengths(workload: Workload, layers: int, phase: Phase) -> list[CollectiveCall]:
    """DoRA's row norms of weights with split inputs: one square per row, in at least fp32."""
    lora = workload.lora
    if lora is None or lora.kind != "dora" or not layers:
        return []
    size = workload.model.hidden * max(4, compute_width(workload.recipe))
    split = sum(target in lora.targets for target in ("o_proj", "down_proj"))
    times = workload.accumulation * layers * split
    return [CollectiveCall("all_reduce", "tp", size, times, phase)] if split else []


def _loss(workload: Workload) -> list[CollectiveCall]:
    """The largest logit of every token; then Σ exp and the target's logit. In at least fp32."""
    width = max(4, compute_width(workload.recipe))
    at_once = tokens_at_once(-(-workload.model.vocab // workload.layout.tp))
    chunks, left = divmod(workload.tokens, at_once)
    found = []
    for tokens, count in ((at_once, chunks), (left, 1)):
        if tokens and count:
            times = count * workload.accumulation
            found.append(CollectiveCall("all_reduce", "tp", tokens * width, times, "forward"))
            found.append(CollectiveCall("all_reduce", "tp", 2 * tokens * width, times, "forward"))
    return found


def shared(workload: Workload, over_tensor: int | None, over_copies: int | None) -> list[CollectiveCall]:
    """Reductions once per step, of the given number of gradients in one message each; None: nothing to reduce."""
    width = reduce_width(workload.recipe)
    sums = (("tp", over_tensor), ("tp copies", over_copies))
    return [
        CollectiveCall("all_reduce", group, elements * width, 1, "gradients")
        for group, elements in sums
        if elements is not None
    ]
