"""What experts communicate (``ep``): tokens to their experts and back, and the gradients and states of the experts.

Announced ahead of the engine, which does not run it yet. Routing is taken to be balanced. t = a rank's tokens of a
micro-batch, c = compute width. For every layer with experts and every micro-batch, over ``ep``:

    forward   all-to-all of how many tokens come from whom                       8 · experts
              all-to-all of tokens to their experts, and of the results back     t · active · hidden · c each
    backward  the two large ones, the other way round; ``recompute`` repeats the forward pass's three

Experts live on the fastest ``ep`` ranks of dp·fsdp·cp. The rest of these hold the same experts and treat them as
other parameters are treated, over what ``ep`` has left of the groups: they shard them as ``zero`` says, the experts
of ``unit`` layers being a unit of their own, or sum their gradients in buckets. Tensor ranks split every expert's
features.
"""

from __future__ import annotations

from math import gcd

from shoal.facts.groups import Unit, even_share
from shoal.facts.model import Model
from shoal.predict.call import Call, Phase, compute_width, reduce_width, state_width
from shoal.predict.held import Held
from shoal.predict.question import Question
from shoal.predict.replicate import bucket_bytes
from shoal.predict.shard import Over, Travelling, bucket_calls, unit_calls


def calls(question: Question, here: Held) -> tuple[Call, ...]:
    if not here.sparse:
        return ()
    return (*_tokens(question, here), *_states(question, here))


def _tokens(question: Question, here: Held) -> list[Call]:
    layout, experts = question.layout, question.model.experts
    if layout.ep == 1 or experts is None:
        return []
    times = question.accumulation * here.sparse
    size = question.tokens * experts.active * question.model.hidden * compute_width(question.recipe)
    passes: list[Phase] = ["forward", "recompute"] if layout.recompute != "none" else ["forward"]
    found = [Call("all_to_all", "ep", 8 * experts.count, times, phase) for phase in passes]
    return found + [Call("all_to_all", "ep", size, 2 * times, phase) for phase in (*passes, "backward")]


def expert_elements(model: Model, tp: int, ep: int) -> int:
    """Parameters of the routed experts of one layer on one rank, before any sharding."""
    experts = model.experts
    if experts is None:
        return 0
    # Gate, up and down.
    return experts.count // ep * 3 * model.hidden * even_share(experts.ffn, tp)


def over(question: Question) -> Over:
    """Who holds the same experts: of the ranks of a copy and of the copies, what ``ep`` has left."""
    layout = question.layout
    ranks = layout.fsdp * layout.cp
    within = gcd(layout.ep, ranks)
    suffix = "/ep" if layout.ep > 1 else ""
    group = "fsdp" if layout.cp == 1 else "fsdp·cp"
    return Over(group + suffix, ranks // within, "dp" + suffix, layout.dp * within // layout.ep)


def _states(question: Question, here: Held) -> list[Call]:
    layout, recipe, ranks = question.layout, question.recipe, over(question)
    elements = expert_elements(question.model, question.layout.tp, question.layout.ep)
    if question.lora is not None and not (ranks.ranks > 1 and layout.zero == 3):
        return []  # frozen
    if ranks.ranks == 1:
        if ranks.copies == 1:
            return []
        count = _bucket_count(question, here)
        size = elements * here.sparse * reduce_width(recipe) // count
        return [Call("all_reduce", ranks.copies_group, size, count, "gradients")]
    if layout.zero == 3:
        count = even_share(here.sparse, layout.unit)
        each = even_share(elements * here.sparse, count * ranks.ranks) * ranks.ranks
        gathers = Unit(()).gathers(each, question.tune.persist_below)
        gradients = 0 if question.lora is not None else each
        return unit_calls(question, [Travelling(each, gradients, count, gathers)], ranks)
    count = _bucket_count(question, here)
    each = even_share(elements * here.sparse, count * ranks.ranks) * ranks.ranks
    return bucket_calls(question, [Travelling(each, each, count, 0)], ranks)


def _bucket_count(question: Question, here: Held) -> int:
    """Three tensors a layer, each of all its experts; a bucket takes as many as fit, and at least one."""
    size = (
        expert_elements(question.model, question.layout.tp, question.layout.ep)
        // 3
        * state_width(question.recipe)
    )
    return even_share(3 * here.sparse, max(1, bucket_bytes(question) // size))
