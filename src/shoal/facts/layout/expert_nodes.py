"""Node-aware expert dispatch: which expert ranks share a node, so that a token is sent once per node and forwarded
inside it.

``parallel/dispatch_by_node.py`` executes this and ``predict`` prices it; both take the decision from here. Where
all ``ep`` ranks share one domain of fast links, or each token has a single expert, every copy of a token goes
straight to its expert's rank.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import RankGroup, expert_ranks
from shoal.facts.model import Experts

# Names of the groups that exchange tokens: all expert ranks; ranks at the same position in every node; ranks of one
# node.
EXCHANGES = ("ep", "ep across", "ep inside")

# Number of parts in which a rank's tokens cross to other nodes: while one part crosses, the other is forwarded
# inside its node, and while one is forwarded, the other is computed. More parts would hide more of the transfer,
# but give experts fewer tokens at a time, which makes each matrix product less efficient.
PARTS = 2


def parts_over(nodes: int, ranks: int) -> int:
    """Number of parts for ``nodes`` nodes of ``ranks`` ranks. With one rank per node there is no forwarding to
    overlap.
    """
    return PARTS if nodes > 1 and ranks > 1 else 1


def part_sizes(tokens: int, parts: int) -> list[int]:
    """Number of tokens in each part, in order."""
    return [(tokens + parts - 1 - number) // parts for number in range(parts)]


class ExpertNodes(NamedTuple):
    """``across``: the ranks at the same position in every node; ``inside``: the ranks of one node. Either may have
    size 1.
    """

    across: RankGroup
    inside: RankGroup


class Split(NamedTuple):
    """How experts are distributed over nodes and, in order, over the ranks of each node."""

    experts: Experts
    nodes: int
    ranks: int  # per node

    @property
    def experts_each(self) -> int:
        """Experts per node."""
        return self.experts.count // self.nodes

    @property
    def parts(self) -> int:
        return parts_over(self.nodes, self.ranks)


def expert_nodes(layout: Layout, domain: int | None, active: int) -> ExpertNodes:
    """``domain``: number of consecutive ranks joined by fast links; None: all. ``active``: experts per token."""
    whole, tp = expert_ranks(layout), layout.tp
    near = layout.ep
    if domain is not None and active > 1:
        # This many neighbouring ranks always share a domain, wherever a group of ``ep`` starts.
        shared = gcd(layout.ep * tp, domain)
        near = shared // tp if shared % tp == 0 else 1
    if near == layout.ep:
        return ExpertNodes(RankGroup("ep across", 1, tp), whole)
    if near == 1:
        return ExpertNodes(whole, RankGroup("ep inside", 1, tp))
    return ExpertNodes(RankGroup("ep across", layout.ep // near, near * tp), RankGroup("ep inside", near, tp))
