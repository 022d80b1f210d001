"""Which expert ranks share a node, so that a token crosses to each node once and is passed on inside it.

``parallel/dispatch_by_node.py`` does it, ``predict`` prices it; both ask here. Where all ``ep`` ranks are in one domain
of fast links, a copy for each expert goes straight to its rank, as it does where a token has but one expert.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import RankGroup, expert_ranks
from shoal.facts.model import Experts

# What the ranks are called that send each other tokens: all; those of the same place in every node; those of one node.
EXCHANGES = ("ep", "ep across", "ep inside")

# In so many parts a rank's tokens travel to other nodes: one crosses between nodes while the other is passed on inside
# its own, and is passed on while the other is computed. More parts would leave less of their way uncovered, and experts
# fewer tokens at a time, of which each product of a GPU is slower.
PARTS = 2


def parts_over(nodes: int, ranks: int) -> int:
    """In how many parts tokens travel to so many nodes of so many ranks: where a node is one rank nothing is passed on
    inside it while another part crosses.
    """
    return PARTS if nodes > 1 and ranks > 1 else 1


def part_sizes(tokens: int, parts: int) -> list[int]:
    """Of each part of a rank's tokens, in order."""
    return [(tokens + parts - 1 - number) // parts for number in range(parts)]


class ExpertNodes(NamedTuple):
    """``across``: the ranks of the same place in every node; ``inside``: those of one. One of them may be alone."""

    across: RankGroup
    inside: RankGroup


class Split(NamedTuple):
    """How experts are spread over nodes and, in order, over the ranks of each."""

    experts: Experts
    nodes: int
    ranks: int  # of one node

    @property
    def experts_each(self) -> int:
        """Of a node."""
        return self.experts.count // self.nodes

    @property
    def parts(self) -> int:
        return parts_over(self.nodes, self.ranks)


def expert_nodes(layout: Layout, domain: int | None, active: int) -> ExpertNodes:
    """``domain``: devices that fast links join, in the order of ranks; None: all. ``active``: a token's experts."""
    whole, tp = expert_ranks(layout), layout.tp
    near = layout.ep
    if domain is not None and active > 1:
        # So many neighbouring ranks are never in two domains, wherever a group of ``ep`` begins.
        shared = gcd(layout.ep * tp, domain)
        near = shared // tp if shared % tp == 0 else 1
    if near == layout.ep:
        return ExpertNodes(RankGroup("ep across", 1, tp), whole)
    if near == 1:
        return ExpertNodes(whole, RankGroup("ep inside", 1, tp))
    return ExpertNodes(RankGroup("ep across", layout.ep // near, near * tp), RankGroup("ep inside", near, tp))
