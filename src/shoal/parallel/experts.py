"""Expert parallelism (``ep``): neighbouring data ranks hold different experts and send each other tokens.

In every MoE layer, each of ``ep`` ranks has an equal, contiguous part of the routed experts; the rest of the network is
as it is without ``ep``. Tokens are sent to the ranks of their experts (``dispatch.py``) or, if those are on several
nodes, through one rank of each node (``dispatch_by_node.py``); ``facts/layout/expert_nodes.py`` decides.

While tokens travel, the shared experts compute (``MixtureOfExperts.forward``). The backward pass runs the same way in
reverse, and overlaps the same way with the gradients' travel.

With tensor parallelism every expert's features are split too, and all ranks of a tensor group have all of its tokens.
Each sends its own 1/tp of every token's features, so a token crosses ``ep`` once, and the expert's tensor group
reassembles it. Results return the same way.
"""

from __future__ import annotations

from torch import nn

from shoal.facts.layout.expert_nodes import Split, expert_nodes
from shoal.facts.model import Experts, Model
from shoal.models.decoder import Network
from shoal.models.experts import Dispatcher, GroupedLinear, MixtureOfExperts
from shoal.parallel.dispatch import Dispatch, Features, SplitFeatures
from shoal.parallel.dispatch_by_node import NodeDispatch
from shoal.parallel.mesh import Mesh


def split(network: Network, model: Model, mesh: Mesh) -> None:
    """Keep this rank's experts of a meta-device network, whose features may be split already."""
    assert model.experts is not None
    travel = _travel(mesh, model.experts)
    for mixture in mixtures(network):
        for projection in mixture.experts.children():
            assert isinstance(projection, GroupedLinear)
            count, *matrix = projection.weight.shape
            held = projection.weight.new_empty(count // mesh.layout.ep, *matrix)
            projection.weight = nn.Parameter(held, projection.weight.requires_grad)
        mixture.travel = travel


def _travel(mesh: Mesh, experts: Experts) -> Dispatcher:
    tensor = mesh.group("tp")
    features = Features()
    if tensor is not None:
        features = SplitFeatures(tensor, mesh.layout.tp, mesh.coords["tp"])
    nodes = expert_nodes(mesh.layout, mesh.domain, experts.active)
    across, group = mesh.group_of(nodes.across), mesh.group_of(nodes.inside)
    inside = Dispatch(group, nodes.inside.size, experts.count // nodes.across.size, features)
    if across is None:
        return inside
    spread = Split(experts, nodes.across.size, nodes.inside.size)
    return NodeDispatch(across, spread, mesh.index_in(nodes.across), inside)


def mixtures(module: nn.Module) -> list[MixtureOfExperts]:
    return [child for child in module.modules() if isinstance(child, MixtureOfExperts)]
