"""What published runs have in common, where predictions cannot tell layouts apart.

Two layouts that are predicted to be a few percent apart may well be the other way round (``plan/judge.py``). Those who
measured such runs at length settled on a few rules, which stand for what a cost model leaves out. A layout may depart
from them where it is faster by more than that; otherwise it has to be explained, and so a departure counts as a part
(``plan/complexity.py``).

- Tensor ranks fill a node before there are pipeline stages: Narayanan et al., "Efficient Large-Scale Language Model
  Training on GPU Clusters Using Megatron-LM" (SC 2021), takeaway 1; so do Korthikanti et al. (2022) and Llama 3 405B.
- Experts are spread over ranks rather than gathered on each: GShard (2020), Mixtral in Megatron-Core's recipes,
  DeepSeek-V3.
"""

from __future__ import annotations

from shoal.facts.cluster import Cluster
from shoal.facts.model import Model
from shoal.plan.space import ModelSplit, WorkShare
from shoal.predict.workload import Workload

STAGES_FIRST = "pipeline stages before tensor ranks fill a node"
EXPERTS_EVERYWHERE = "every expert on every rank"
NAMES = STAGES_FIRST, EXPERTS_EVERYWHERE


def fast_links(cluster: Cluster) -> int:
    """Devices that a node's own links join."""
    return max(cluster.fast_domain, cluster.devices_per_node)


def of_split(split: ModelSplit, model: Model, cluster: Cluster) -> int:
    return int(_stages_first(split.tp, split.pp, model, cluster))


def of_share(split: ModelSplit, share: WorkShare, model: Model) -> int:
    return int(_everywhere(share.ep, split.data * split.cp, model))


def departures(workload: Workload) -> list[str]:
    """By name."""
    layout, model, cluster = workload.layout, workload.model, workload.cluster
    found = [STAGES_FIRST] if _stages_first(layout.tp, layout.pp, model, cluster) else []
    if _everywhere(layout.ep, layout.data_ranks * layout.cp, model):
        found.append(EXPERTS_EVERYWHERE)
    return found


def _stages_first(tp: int, pp: int, model: Model, cluster: Cluster) -> bool:
    """A model that is split by tensors and by layers, on nodes that would hold more of its tensor ranks."""
    node = fast_links(cluster)
    return pp > 1 and 1 < tp < node and model.heads % node == 0


def _everywhere(ep: int, ranks: int, model: Model) -> bool:
    return model.experts is not None and ep == 1 and ranks > 1
