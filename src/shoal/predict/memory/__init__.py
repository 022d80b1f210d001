"""The memory ledger: what a rank holds at the peak of a step.

In order of computation: the inventory of a rank (``inventory``: its stages, parameter counts, bytes per parameter and
per micro-batch) → bytes per category (``states``: parameters and optimizer states; ``gradients``, with the buffers of
their reduction in ``replicate``, ``zero``, ``shard``, ``offload``, named after the strategy; ``activations``;
``logits``) → the few moments that can be the peak (``peaks``) → the ledger, plus what the device holds beyond tensors
(``device``). A ledger is the largest sum of what is alive at one moment, not a sum of per-category maxima.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.facts.layout.offload import leaves_early
from shoal.facts.ledger import Ledger
from shoal.predict.memory.device import beside_tensors, host_share, nvme_share, on_top
from shoal.predict.memory.gradients import RankGradients
from shoal.predict.memory.in_backward import ConsumedGradients
from shoal.predict.memory.inventory import RankInventory, fullest_ranks, rank_inventories
from shoal.predict.memory.offload import LeavingGradients
from shoal.predict.memory.peak import Peak
from shoal.predict.memory.peaks import peaks, waiting_activations
from shoal.predict.memory.replicate import ReplicatedGradients
from shoal.predict.memory.shard import PipelinedShards, ShardedGradients
from shoal.predict.memory.states import elsewhere, optimizer_states, parameters
from shoal.predict.memory.zero import ScatteredGradients
from shoal.predict.offload_cut import shards_apart
from shoal.predict.workload import Workload


def ledger(workload: Workload, fits: Callable[[Ledger], bool] | None = None) -> Ledger:
    """The ledger of the pipeline rank that needs the most memory; with ``fits``, of the first rank that does not fit.

    Where data ranks keep different shares of their states on the device, the ledger takes the largest device share,
    and off the device the amounts of the rank with the smallest device share.
    """
    found = []
    for rank in fullest_ranks(workload):
        alike = [_rank_ledger(replace(rank, shard=shard)) for shard in shards_apart(workload)]
        most = max(alike, key=lambda one: one.peak_allocated)
        found.append(replace(most, host=max(one.host for one in alike), nvme=max(one.nvme for one in alike)))
        if fits is not None and not fits(found[-1]):
            return found[-1]
    return max(found, key=lambda one: one.peak_allocated)


def ledgers(workload: Workload, shard: int = 0) -> list[Ledger]:
    """The ledgers of all pipeline ranks; ``shard``: which of the data ranks that shard optimizer states."""
    return [_rank_ledger(replace(rank, shard=shard)) for rank in rank_inventories(workload)]


def rank_gradients(rank: RankInventory) -> RankGradients:
    """The gradient accounting of the strategy that shards or replicates this rank's parameters."""
    layout = rank.workload.layout
    if rank.sharded:
        return ShardedGradients(rank) if layout.pp == 1 else PipelinedShards(rank)
    if layout.shards > 1 and layout.zero == 2 and layout.pp == 1:
        return ScatteredGradients(rank)
    if layout.dp * layout.shards == 1:
        if rank.workload.tune.optimizer_in_backward:
            return ConsumedGradients(rank)
        return LeavingGradients(rank) if leaves_early(layout) else RankGradients(rank)
    return ReplicatedGradients(rank)


def _rank_ledger(rank: RankInventory) -> Ledger:
    workload, gradients = rank.workload, rank_gradients(rank)
    states, optimizer, away = parameters(rank), optimizer_states(rank), elsewhere(rank)
    peak = max(peaks(gradients), key=Peak.total)
    waiting = waiting_activations(rank)
    device = {
        "params": round(states.device),
        "grads": round(peak.grads),
        "optimizer": round(optimizer.device),
        "activations": round(peak.activations),
        "logits": round(peak.logits),
        "buffers": round(peak.buffers) + beside_tensors(rank),
    }
    allocated = sum(device.values())
    band = on_top(workload, allocated + round(gradients.in_other_streams(peak.grads)))
    return Ledger(
        **device,
        peak_allocated=allocated,
        reserved=band.reserved,
        device_total=band.total,
        device_p90=band.p90,
        capacity=workload.cluster.device.memory_bytes,
        worst_stage=rank.number,
        master=round(optimizer.master),
        instant=peak.name,
        host=round(away.host + waiting.host),
        host_capacity=host_share(workload.cluster),
        nvme=round(away.nvme + waiting.nvme),
        nvme_capacity=nvme_share(workload.cluster),
    )
