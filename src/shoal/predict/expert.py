"""Traffic of expert parallelism (``ep``): tokens to their experts and back, and the experts' gradients and states.

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

from shoal.facts.groups import Unit, even_share
from shoal.facts.parameter_groups import EXPERTS
from shoal.facts.precision import compute_width, gradient_width, reduce_width
from shoal.predict.call import Call, Phase
from shoal.predict.question import Question
from shoal.predict.rank_parameters import RankParameters, expert_elements
from shoal.predict.replicate import bucket_bytes
from shoal.predict.shard import Travelling, bucket_calls, unit_calls


def calls(question: Question, here: RankParameters) -> tuple[Call, ...]:
    if not here.sparse:
        return ()
    return (*_tokens(question, here), *_states(question, here))


def _tokens(question: Question, here: RankParameters) -> list[Call]:
    layout, experts = question.layout, question.model.experts
    if layout.ep == 1 or experts is None:
        return []
    times = question.accumulation * here.sparse
    size = question.tokens * experts.active * question.model.hidden * compute_width(question.recipe)
    passes: list[Phase] = ["forward", "recompute"] if layout.recompute != "none" else ["forward"]
    found = [Call("all_to_all", "ep", 8 * experts.count, times, phase) for phase in passes]
    return found + [Call("all_to_all", "ep", size, 2 * times, phase) for phase in (*passes, "backward")]


def _states(question: Question, here: RankParameters) -> list[Call]:
    recipe, group = question.recipe, question.groups[EXPERTS]
    shards, copies = group.sharded.size, group.replicated
    elements = expert_elements(question.model, question.layout.tp, question.layout.ep)
    if not group.trained and not (shards > 1 and group.zero == 3):
        return []
    if shards == 1:
        if copies.size == 1:
            return []
        count = _bucket_count(question, here)
        size = elements * here.sparse * reduce_width(recipe) // count
        return [Call("all_reduce", copies.name, size, count, "gradients")]
    count = (
        even_share(here.sparse, question.layout.unit) if group.zero == 3 else _bucket_count(question, here)
    )
    each = even_share(elements * here.sparse, count * shards) * shards
    gathers = Unit(()).gathers(each, question.tune.persist_below)
    travelling = [Travelling(each, each if group.trained else 0, count, gathers)]
    return (unit_calls if group.zero == 3 else bucket_calls)(question, travelling, group)


def _bucket_count(question: Question, here: RankParameters) -> int:
    """Three tensors a layer, each of all its experts; a bucket takes as many as fit, and at least one."""
    size = (
        expert_elements(question.model, question.layout.tp, question.layout.ep)
        // 3
        * gradient_width(question.recipe)
    )
    return even_share(3 * here.sparse, max(1, bucket_bytes(question) // size))
