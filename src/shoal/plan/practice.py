"""What published runs have in common, where predictions cannot tell layouts apart.

Two layouts predicted to be a few percent apart may really be in the other order (``plan/judge.py``). Practitioners who
measured such runs at length settled on a few rules, which stand for what a cost model leaves out. A layout may depart
from them if it is faster by more than that; otherwise the departure needs explaining, so it counts as a part
(``plan/complexity.py``).

- Tensor ranks stay within a node: beyond it every layer waits for the network, and for whatever slows it down. And
  they fill it before there are pipeline stages: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
  Clusters Using Megatron-LM" (SC 2021), takeaway 1; so do Korthikanti et al. (2022) and Llama 3 405B.
- Stages follow 1F1B, plain or interleaved: every published row of Shoal's collection with stages does, and so did
  Llama 3 405B. Schedules with fewer bubbles are reported only by their authors.
- Sequences of more than 65,536 tokens are split over context ranks.
- Context ranks share a node with their tensor ranks, unless those fill it: the ring of keys and values overlaps
  attention, which is short. So Llama 3 orders its ranks (TP, CP, PP, DP), and Megatron-Bridge's recipe of Llama 3.1
  405B has tp=8, cp=2.
- States sharded within replicas are sharded over whole nodes, so that only the reduction among replicas leaves a
  node: PyTorch's HSDP and MiCS. Megatron shards the optimizer states alone (its distributed optimizer).
- Weights or gradients are sharded over 512 ranks at most, with replicas beyond: every block is gathered from all
  ranks, so each late one delays the others. The PyTorch FSDP paper (2023) ends there, and so do the published rows of
  Shoal's collection.
- Experts are spread over the ranks of a node, or more, rather than gathered on each: GShard (2020), Mixtral in
  Megatron-Core's recipes, DeepSeek-V3.
"""

from __future__ import annotations

from math import gcd

from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import MEGATRON_CORE, Stack
from shoal.facts.layout import Schedule, Zero
from shoal.facts.model import Model
from shoal.plan.space import ModelSplit, PipelineOrder, RankWork, StateSharding
from shoal.predict.workload import Workload

ACROSS_NODES = "tensor ranks across nodes"
STAGES_FIRST = "pipeline stages before tensor ranks fill a node"
EXPERTS_GATHERED = "experts that more ranks of a node could share"
RARE_SCHEDULE = "a schedule that few have run"
CONTEXT_ACROSS = "context ranks across nodes that tensor ranks do not fill"
PARTS_OF_NODES = "states sharded over parts of nodes"
MANY_SHARDS = "weights shared by more ranks than in any published run"
NO_CONTEXT = "sequences this long without context ranks"
NAMES = (
    ACROSS_NODES,
    STAGES_FIRST,
    EXPERTS_GATHERED,
    RARE_SCHEDULE,
    CONTEXT_ACROSS,
    PARTS_OF_NODES,
    MANY_SHARDS,
    NO_CONTEXT,
)
# The most ranks that sharded weights or gradients in published rows.
MOST_SHARDS = 512
# Longer sequences were all split: Llama 3 from 131,072 tokens on, DeepSpeed-Ulysses, torchtitan.
LONGEST_WHOLE = 65536
USUAL_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved")


def fast_links(cluster: Cluster) -> int:
    """Devices joined by a node's own links."""
    return max(cluster.fast_domain, cluster.devices_per_node)


def usual_zero(stack: Stack) -> Zero:
    """The ZeRO stage that a stack uses by default."""
    return 1 if stack.name == MEGATRON_CORE.name else 3


def of_split(split: ModelSplit, model: Model, cluster: Cluster, seq: int) -> int:
    departs = int(_without_context(split.cp, split.tp * split.pp * split.data, seq))
    departs += (split.tp > fast_links(cluster)) + _stages_first(split.tp, split.pp, model, cluster)
    return departs + _context_across(split.tp, split.cp, cluster)


def of_states(split: ModelSplit, states: StateSharding, cluster: Cluster) -> int:
    parts = _parts_of_nodes(split.tp * split.cp * states.fsdp, states.dp, states.fsdp, cluster)
    return parts + _many_shards(split.cp * states.fsdp, states.zero)


def of_share(split: ModelSplit, share: RankWork, model: Model, cluster: Cluster) -> int:
    return int(_gathered(share.ep, split.data * split.cp, model, cluster))


def of_order(split: ModelSplit, order: PipelineOrder) -> int:
    return int(_rare(split.pp, order.schedule))


def departures(workload: Workload) -> list[str]:
    """The departures of a workload, by name."""
    layout, model, cluster = workload.layout, workload.model, workload.cluster
    found = [ACROSS_NODES] if layout.tp > fast_links(cluster) else []
    if _stages_first(layout.tp, layout.pp, model, cluster):
        found.append(STAGES_FIRST)
    if _gathered(layout.ep, layout.data_ranks * layout.cp, model, cluster):
        found.append(EXPERTS_GATHERED)
    if _rare(layout.pp, layout.schedule):
        found.append(RARE_SCHEDULE)
    if _context_across(layout.tp, layout.cp, cluster):
        found.append(CONTEXT_ACROSS)
    if _parts_of_nodes(layout.tp * layout.cp * layout.fsdp, layout.dp, layout.fsdp, cluster):
        found.append(PARTS_OF_NODES)
    if _many_shards(layout.shards, layout.zero):
        found.append(MANY_SHARDS)
    if _without_context(layout.cp, layout.world, workload.recipe.seq):
        found.append(NO_CONTEXT)
    return found


def _without_context(cp: int, ranks: int, seq: int) -> bool:
    return cp == 1 < ranks and seq > LONGEST_WHOLE


def _context_across(tp: int, cp: int, cluster: Cluster) -> bool:
    node = fast_links(cluster)
    return cp > 1 and tp < node < tp * cp


def _parts_of_nodes(ranks: int, replicas: int, fsdp: int, cluster: Cluster) -> bool:
    """Whether states are sharded over a part of a node, with several replicas on several nodes."""
    node = fast_links(cluster)
    return replicas > 1 and fsdp > 1 and cluster.devices > node and ranks % node != 0


def _many_shards(ranks: int, zero: Zero) -> bool:
    """Sharding optimizer states alone does not count, since these are exchanged once per step."""
    return zero > 1 and ranks > MOST_SHARDS


def _stages_first(tp: int, pp: int, model: Model, cluster: Cluster) -> bool:
    """A model split by tensors and by layers, on nodes with room for more tensor ranks."""
    node = fast_links(cluster)
    return pp > 1 and 1 < tp < node and model.heads % node == 0


def _gathered(ep: int, ranks: int, model: Model, cluster: Cluster) -> bool:
    """Fewer expert ranks than a node has room for."""
    return model.experts is not None and ep < gcd(model.experts.count, ranks, fast_links(cluster))


def _rare(pp: int, schedule: Schedule) -> bool:
    return pp > 1 and schedule not in USUAL_SCHEDULES
