"""Memory of parameters and optimizer states between steps, and where ``offload`` puts them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.facts.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.parameters import parameter_count
from shoal.facts.recipe import Recipe
from shoal.predict.memory.inventory import RankInventory


@dataclass(frozen=True)
class Resting:
    """Bytes of one category, by where they are."""

    device: float
    host: float
    nvme: float
    master: float = 0.0  # of those on the device, the fp32 copies of half-precision weights


def parameters(rank: RankInventory) -> Resting:
    """With ``zero=3`` a rank's rows of them. What is frozen rests as it is used."""
    count, hold = rank.total, rank.hold
    size = hold.weight * (count.trained_share if rank.sharded else count.trained)
    size += (_unsharded(rank).weight - hold.weight) * rank.all_whole_experts
    if rank.workload.lora is not None:
        size += hold.frozen * (count.share if rank.sharded else count.whole)
    return _placed(rank, "params", size)


def optimizer_states(rank: RankInventory) -> Resting:
    """Of the parameters that this rank updates: every ``zero`` shards them."""
    hold, updated = rank.hold, rank.total.trained_share
    master = hold.master * updated + (_unsharded(rank).master - hold.master) * rank.all_whole_experts
    return _placed(rank, "optimizer", hold.moments * updated + master, master)


def _unsharded(rank: RankInventory) -> BytesPerParameter:
    return bytes_per_parameter(rank.workload.recipe, rank.workload.stack, one_pass=rank.workload.one_pass)


def updated_gradients(rank: RankInventory) -> float:
    """Gradients as the optimizer reads them: from ``zero=2`` on those of this rank's share."""
    count = rank.total
    return rank.hold.gradient * (count.trained_share if rank.workload.layout.zero >= 2 else count.trained)


def waiting_gradients(rank: RankInventory) -> float:
    """An update in the host's memory needs the gradients there."""
    return rank.offloaded("optimizer") * updated_gradients(rank)


def _placed(rank: RankInventory, what: str, size: float, master: float = 0.0) -> Resting:
    away, stay = rank.offloaded(what) * size, 1 - rank.offloaded(what)
    host, nvme = (0.0, away) if rank.on_nvme(what) else (away, 0.0)
    return Resting(device=size - away, host=host, nvme=nvme, master=master * stay)


def replica_states(model: Model, recipe: Recipe) -> dict[str, int]:
    """Bytes of one unsharded replica, as Shoal's engine keeps them."""
    hold = bytes_per_parameter(recipe, SHOAL)
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
    ranks = {name: layout.shards if on else 1 for name, on in sharded_here.items()}
    return {name: -(-size // (layout.tp * layout.pp * ranks[name])) for name, size in whole.items()}
