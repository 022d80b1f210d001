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

from shoal.facts.layout.buckets import Unit, even_share
from shoal.facts.layout.parameter_groups import EXPERTS
from shoal.facts.precision import compute_width, gradient_width, reduce_width
from shoal.predict.collective_call import CollectiveCall, Phase
from shoal.predict.rank_parameters import RankParameters, expert_elements
from shoal.predict.traffic.replicate import bucket_bytes
from shoal.predict.traffic.shard import Travelling, bucket_calls, unit_calls
from shoal.predict.workload import Workload


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    if not here.sparse:
        return ()
    return (*_tokens(workload, here), *_states(workload, here))


def _tokens(workload: Workload, here: RankParameters) -> list[CollectiveCall]:
    layout, experts = workload.layout, workload.model.experts
    if layout.ep == 1 or experts is None:
        return []
    times = workload.accumulation * here.sparse
    size = workload.tokens * experts.active * workload.model.hidden * compute_width(workload.recipe)
    passes: list[Phase] = ["forward", "recompute"] if layout.recompute != "none" else ["forward"]
    found = [CollectiveCall("all_to_all", "ep", 8 * experts.count, times, phase) for phase in passes]
    return found + [
        CollectiveCall("all_to_all", "ep", size, 2 * times, phase) for phase in (*passes, "backward")
    ]


def _states(workload: Workload, here: RankParameters) -> list[CollectiveCall]:
    recipe, group = workload.recipe, workload.groups[EXPERTS]
    shards, copies = group.sharded.size, group.replicated
    elements = expert_elements(workload.model, workload.layout.tp, workload.layout.ep)
    if not group.trained and not (shards > 1 and group.zero == 3):
        return []
    if shards == 1:
        if copies.size == 1:
            return []
        count = _bucket_count(workload, here)
        size = elements * here.sparse * reduce_width(recipe) // count
        return [CollectiveCall("all_reduce", copies.name, size, count, "gradients")]
    count = (
        even_share(here.sparse, workload.layout.unit) if group.zero == 3 else _bucket_count(workload, here)
    )
    each = even_share(elements * here.sparse, count * shards) * shards
    gathers = Unit(()).gathers(each, workload.tune.persist_below)
    travelling = [Travelling(each, each if group.trained else 0, count, gathers)]
    return (unit_calls if group.zero == 3 else bucket_calls)(workload, travelling, group)


def _bucket_count(workload: Workload, here: RankParameters) -> int:
    """Three tensors a layer, each of all its experts; a bucket takes as many as fit, and at least one."""
    size = (
        expert_elements(workload.model, workload.layout.tp, workload.layout.ep)
        // 3
        * gradient_width(workload.recipe)
    )
    return even_share(3 * here.sparse, max(1, bucket_bytes(workload) // size))
