"""Traffic of context parallelism (``cp``): keys and values around a ring, or heads for tokens (Ulysses).

t = a rank's tokens of a micro-batch, c = compute width, q and k the widths of all query and of all key (value) heads
of a tensor rank. For every layer and micro-batch, over ``cp``:

    ring      forward   cp - 1 sends and receives of keys with values          t·2k·c
              backward  cp - 1 of keys with values, and cp - 1 of the gradients that others have for them
    ulysses   forward   all-to-alls of queries and of attention's output       t·q·c
                        and of keys and of values                              t·k·c, k at least a head for every rank
              backward  the same four, in the other direction

Recomputed attention (``recompute``) repeats the exchanges of its forward pass; a compiled block does so only with
``full``, and its ring uses all-to-alls in which each rank has data for the next one only. A loss over whole rows
(``facts/losses.py``) reduces one 8-byte number per row at the end of the network. Gradients of parameters are reduced
over context ranks together with ``fsdp``: see ``shard``.
"""

from __future__ import annotations

from shoal.facts.model import Model
from shoal.facts.precision import compute_width
from shoal.predict.collective_call import CollectiveCall, Phase
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.workload import Workload

ATTENDED = ("q_proj", "k_proj", "v_proj")


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    layout = workload.layout
    if layout.cp == 1:
        return ()
    times = workload.accumulation * here.layers
    still = _without_gradient(workload, here)
    rows: tuple[CollectiveCall, ...] = ()
    if here.last and workload.recipe.loss_facts.of_log_probabilities:
        rows = (CollectiveCall("all_reduce", "cp", 8 * workload.micro, workload.accumulation, "forward"),)
    if layout.cp_kind == "ring":
        size, turns = turn_bytes(workload), layout.cp - 1
        back = times - workload.accumulation * (still == {*ATTENDED})
        return rows + tuple(
            CollectiveCall(op, "cp", size, turns * (2 * back if phase == "backward" else times), phase)
            for phase in passes(workload)
            for op in (("all_to_all",) if workload.compiled else ("send", "receive"))
        )
    token = workload.tokens * compute_width(workload.recipe)
    query, key, value = _widths(workload.model, layout.tp)
    least = layout.cp * workload.model.head_dim
    mixed = _mixed(workload.model, layout.tp)
    tensors = dict(zip((*ATTENDED, "mixed"), (query, max(key, least), max(value, least), mixed), strict=True))
    still |= {"mixed"} if len(still) == len(ATTENDED) else set()

    def often(width: int, phase: Phase) -> int:
        count = list(tensors.values()).count(width) * times
        once = sum(tensors[name] == width for name in still) if phase == "backward" else 0
        return count - once * workload.accumulation

    return rows + tuple(
        CollectiveCall("all_to_all", "cp", token * width, often(width, phase), phase)
        for phase in passes(workload)
        for width in dict.fromkeys(tensors.values())
    )


def _without_gradient(workload: Workload, here: RankParameters) -> set[str]:
    """Inputs of attention in the first block that get no gradient, because nothing trained produced them."""
    if workload.lora is None or not here.first:
        return set()
    return {name for name in ATTENDED if name not in workload.lora.targets}


def passes(workload: Workload) -> list[Phase]:
    """The passes in which attention exchanges its inputs."""
    keeps = "none", "selective" if workload.compiled else "none"
    again: list[Phase] = [] if workload.layout.recompute in keeps else ["recompute"]
    return ["forward", "backward", *again]


def turn_bytes(workload: Workload) -> int:
    """Bytes of one ring message: the keys and values of a rank's tokens, or their gradients."""
    _, key, value = _widths(workload.model, workload.layout.tp)
    return workload.tokens * compute_width(workload.recipe) * (key + value)


def _widths(model: Model, tp: int) -> tuple[int, int, int]:
    """Widths of all queries, keys and values of a token on a tensor rank."""
    heads, key_heads = model.heads // tp, max(1, model.kv_heads // tp)
    value_dim = model.latent.value_dim if model.latent else model.head_dim
    return heads * model.head_dim, key_heads * model.head_dim, key_heads * value_dim


def _mixed(model: Model, tp: int) -> int:
    """Width of attention's output: one value head per query head."""
    return model.heads // tp * (model.latent.value_dim if model.latent else model.head_dim)
