"""What no layout with these degrees can do without: a bound for a search, far cheaper than a ledger."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from shoal.facts.model import Model
from shoal.predict.activations import Work, block
from shoal.predict.places import pipeline_of
from shoal.predict.question import Question
from shoal.predict.states import held
from shoal.predict.weights import Split, adapters


def least_bytes(question: Question) -> int:
    """At most what ``ledger`` says of peak allocated, whatever the policies are.

    Of the layout only dp·fsdp, tp, cp, pp, ep and ``offload`` are read. All data ranks shard everything; the average
    rank of the pipeline holds its part of that, and gradients or one block's backward pass of one sequence on top.
    """
    layout, recipe = question.layout, question.recipe
    hold = held(question)
    shares = {part.what: part.fraction for part in layout.offload}
    params = 1 - shares.get("params", 0.0)
    optimizer = 1 - shares.get("optimizer", 0.0)
    degrees = layout.tp, layout.ep, layout.dp * layout.fsdp * layout.cp, layout.pp
    lora = adapters(question.lora)
    share, frozen = _average(question.model, degrees, lora, recipe.seq, question.stack.even_stages)
    work = Work(
        recipe.seq // layout.cp,
        recipe.seq,
        layout.tp,
        layout.tp > 1,
        hold.compute,
        question.stack,
        "none",
        question.cluster.device.name == "cpu",
        False,
        None,
        None if question.lora is None else tuple(question.lora.targets),
    )
    rest = hold.weight * params * share + hold.frozen * params * frozen
    rest += (hold.moments + hold.master) * optimizer * share
    return int(rest + max(hold.gradient * share, _block(question.model, work)))


@lru_cache(maxsize=65536)
def _block(model: Model, work: Work) -> float:
    """The block that needs least, with its tensors and their gradients."""
    kinds = {model.has_experts(layer) for layer in range(model.layers)}
    found = [block(model, experts, False, work) for experts in kinds]
    return min(one.resting + one.working for one in found)


@lru_cache(maxsize=4096)
def _average(
    model: Model,
    degrees: tuple[int, int, int, int],
    lora: tuple[int, tuple[str, ...]] | None,
    seq: int,
    even: bool,
) -> tuple[float, float]:
    """Trained and frozen parameters of an average rank of the pipeline, in shards."""
    tp, ep, ranks, pp = degrees
    split = Split(tp, ep, ranks, max(1, ranks // gcd(ranks, ep)))
    places = pipeline_of(model, split, lora, ("1f1b", pp, 1), seq, even).ranks
    whole = sum(place.total.share + place.total.expert_share for place in places) / pp
    if lora is None:
        return whole, 0.0
    return sum(place.total.adapter_share for place in places) / pp, whole
