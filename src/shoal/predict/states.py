"""What is held between two steps: weights, gradients, optimizer states, in bytes."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.holdings import Holdings, holdings
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.parameter_groups import DENSE
from shoal.facts.parameters import parameter_count
from shoal.facts.recipe import Recipe
from shoal.facts.stack import SHOAL
from shoal.predict.places import Place
from shoal.predict.question import Question


class Resting(NamedTuple):
    """Bytes of one rank."""

    params: float
    grads: float  # as they are when the optimizer runs
    optimizer: float  # with master weights
    master: float


def held(question: Question) -> Holdings:
    """Bytes a parameter."""
    recipe = question.recipe
    return holdings(recipe.precision, recipe.states, recipe.reduce, recipe.optimizer, question.stack)


def resting(question: Question, hold: Holdings, place: Place, in_shards: bool) -> Resting:
    """What a rank of a pipeline holds, as ``zero`` shares it out over the ranks that shard."""
    total, lora = place.total, question.lora is not None
    whole = total.adapter if lora else total.dense + total.expert
    share = total.adapter_share if lora else total.share + total.expert_share
    weights = hold.weight * (share if in_shards else whole)
    if lora:
        frozen = total.share + total.expert_share if in_shards else total.dense + total.expert
        weights += hold.frozen * frozen
    gradients = hold.gradient * (share if question.layout.zero >= 2 else whole)
    return Resting(weights, gradients, (hold.moments + hold.master) * share, hold.master * share)


def sharded(question: Question) -> bool:
    """Whether parameters rest in shards."""
    group = question.groups[DENSE]
    return group.sharded.size > 1 and (group.zero == 3 or question.stack.unsharded == "fsdp")


def replica_states(model: Model, recipe: Recipe) -> dict[str, int]:
    """Bytes of one unsharded replica, as Shoal's engine keeps them."""
    hold = holdings(recipe.precision, recipe.states, recipe.reduce, recipe.optimizer, SHOAL)
    count = parameter_count(model)
    return {
        "params": round(count * hold.weight),
        "grads": round(count * hold.gradient),
        "optimizer": round(count * hold.moments),
    }


def rank_states(model: Model, recipe: Recipe, layout: Layout) -> dict[str, int]:
    """An even share of them: what a rank of this layout holds, but for padding and stages of unequal size."""
    whole = replica_states(model, recipe)
    sharded_here = {"params": layout.zero == 3, "grads": layout.zero >= 2, "optimizer": True}
    ranks = {name: layout.fsdp if on else 1 for name, on in sharded_here.items()}
    return {name: -(-size // (layout.tp * layout.pp * ranks[name])) for name, size in whole.items()}
