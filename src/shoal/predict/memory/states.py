"""Memory of parameters and optimizer states between steps, and where ``offload`` puts them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.facts.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.layout import Layout
from shoal.facts.layout.offload import (
    OffDevice,
    away_bytes,
    leaves_early,
    off_device,
    staged_bytes,
    states_may_be_late,
    waiting,
)
from shoal.facts.layout.parameter_groups import DENSE, EXPERTS
from shoal.facts.model import Model
from shoal.facts.model.parameters import parameter_count
from shoal.facts.recipe import Recipe
from shoal.predict.memory.inventory import RankInventory
from shoal.predict.memory.update import own_states
from shoal.predict.offload_cut import largest_block, largest_piece
from shoal.predict.rank_parameters import ParameterCount


@dataclass(frozen=True)
class Resting:
    """Bytes of one category on the device."""

    device: float
    master: float = 0.0  # included in ``device``: the fp32 master copies of half-precision weights


def parameters(rank: RankInventory) -> Resting:
    """Weights at rest; with ``zero=3`` this rank's shard. Frozen weights are stored as they are used."""
    size = _weights(rank) + _frozen(rank, rank.total)
    if rank.workload.lora is None:  # under LoRA everything else is frozen
        size += (_unsharded(rank).weight - rank.hold.weight) * rank.all_whole_experts
    return Resting(size * (1 - rank.offloaded("params")))


def optimizer_states(rank: RankInventory) -> Resting:
    """Optimizer states of the parameters that this rank updates: sharded under every ``zero``."""
    hold, updated = rank.hold, rank.total.trained_share
    master = hold.master * updated
    if rank.workload.lora is None:
        master += (_unsharded(rank).master - hold.master) * rank.all_whole_experts
    stays, own = 1 - rank.offloaded("optimizer"), own_states(rank)
    moments = hold.moments * updated if own is None else own
    return Resting((moments + master) * stays, master * stays)


def elsewhere(rank: RankInventory) -> OffDevice:
    """Bytes of offloaded states, gradients and weights in host memory and on NVMe."""
    workload, updated = rank.workload, rank.total.trained_share
    optimizer, params = (waiting(workload.layout.offload, what) for what in ("optimizer", "params"))
    host = nvme = 0.0
    each = away_bytes(workload.recipe, workload.layout, workload.accumulation, workload.stack)
    if optimizer is not None:
        away, adds_up = rank.offloaded("optimizer") * updated, workload.accumulation > 1
        adds_up = adds_up and leaves_early(workload.layout)
        all_filed = params is not None and params.nvme and optimizer.nvme
        largest = largest_piece(workload, rank.number, rank.shard) if optimizer.nvme else 0
        # Weights that live on the host are not sent back to the device.
        through_ring = states_may_be_late(workload.recipe, workload.layout) and params is None
        returning = away if through_ring else 0.0
        block = _largest_block(rank) if adds_up else 0
        host, nvme = off_device(each, away, block, optimizer, adds_up, largest, all_filed, returning)
    if params is not None:
        weights = rank.offloaded("params") * (_weights(rank) + _frozen(rank, rank.total))
        host, nvme = (host, nvme + weights) if params.nvme else (host + weights, nvme)
        if params.nvme and optimizer is not None and not optimizer.nvme:
            host += staged_bytes(adds_up=False)  # staging for weights alone
        if params.nvme and rank.sharded:
            host += min(weights, _rows_ahead(rank))
    return OffDevice(host, nvme)


def _largest_block(rank: RankInventory) -> float:
    """Elements of the most that one transformer block's gradients bring to the host at once."""
    if rank.workload.lora is None:
        return largest_block(rank.workload, rank.number, rank.shard)
    # Only adapters are updated, and each of them whole.
    return max(run.block.trained_share for stage in rank.stages for run in stage.runs)


def _rows_ahead(rank: RankInventory) -> float:
    """One unit's shards of blocks, prefetched from NVMe ahead of FSDP. Unsharded experts are copied directly."""
    layout, found, lora = rank.workload.layout, 0.0, rank.workload.lora
    apart = rank.hold.weight
    if lora is not None:
        apart = rank.workload.gathered_width if lora.base == "nf4" else rank.hold.frozen
    for run in (run for stage in rank.stages for run in stage.runs):
        block = rank.hold.weight * run.block.trained_share + _frozen(rank, run.block)
        block -= apart * rank.whole_experts if run.experts else 0
        found = max(found, block * min(layout.unit, run.layers))
    return found


def _weights(rank: RankInventory) -> float:
    return rank.hold.weight * (rank.total.trained_share if rank.sharded else rank.total.trained)


def _frozen(rank: RankInventory, total: ParameterCount) -> float:
    """Frozen weights: LoRA's base model, or what recipe groups freeze. ``total``: of the rank, or of one block."""
    if rank.workload.lora is None and not rank.workload.recipe.freezes:
        return 0.0
    count = total.share if rank.sharded else total.whole
    if rank.workload.lora is None:
        count -= total.trained_share if rank.sharded else total.trained
        return rank.hold.frozen * count
    whole = rank.hold.frozen * count
    if rank.workload.lora.base != "nf4":
        return whole
    packed = float(total.projections)
    if rank.sharded:
        groups = rank.workload.groups
        dense, routed = groups[DENSE].sharded.size, groups.get(EXPERTS, groups[DENSE]).sharded.size
        packed = (total.projections - total.packed_experts) / dense + total.packed_experts / routed
    return whole - (rank.hold.frozen - rank.workload.gathered_width) * packed


def _unsharded(rank: RankInventory) -> BytesPerParameter:
    return bytes_per_parameter(rank.workload.recipe, rank.workload.stack, one_pass=rank.workload.one_pass)


def updated_gradients(rank: RankInventory) -> float:
    """Gradients as the optimizer reads them: from ``zero=2`` on, only this rank's shard."""
    count = rank.total
    return rank.hold.gradient * (count.trained_share if rank.workload.layout.zero >= 2 else count.trained)


def replica_states(model: Model, recipe: Recipe) -> dict[str, int]:
    """Bytes of one unsharded replica in Shoal's engine."""
    hold = bytes_per_parameter(recipe, SHOAL)
    count = parameter_count(model)
    return {
        "params": round(count * hold.weight),
        "grads": round(count * hold.gradient),
        "optimizer": round(count * hold.moments),
    }


def rank_states(model: Model, recipe: Recipe, layout: Layout) -> dict[str, int]:
    """A replica's states divided evenly: what a rank of this layout holds, up to padding and uneven stages."""
    whole = replica_states(model, recipe)
    sharded_here = {"params": layout.zero == 3, "grads": layout.zero >= 2, "optimizer": True}
    ranks = {name: layout.shards if on else 1 for name, on in sharded_here.items()}
    return {name: -(-size // (layout.tp * layout.pp * ranks[name])) for name, size in whole.items()}
