"""Expert load: how unevenly tokens spread over expert ranks, where the busiest sets the pace, and over how many nodes
a token's experts spread.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from shoal.facts.model import Experts

# The busiest rank's load relative to an even share, per micro-batch and layer. An assumption, since no run with many
# expert ranks was measured here: a router with bias correction keeps single experts within some 4 % over whole batches
# (DeepSeek's loss-free balancing), one with a balance loss alone lets the busiest have half as much again, and
# averaging over a rank's experts evens out some of a micro-batch's extra imbalance.
BUSIEST = 1.1


def busiest(ep: int) -> float:
    """The busiest of ``ep`` ranks' load in even shares. A single rank with all experts has all tokens."""
    return BUSIEST if ep > 1 else 1.0


def crossing(experts: Experts, tokens: int, nodes: int) -> int:
    """Token copies sent to nodes: one per node with an expert of the token (its own included), routed evenly."""
    return round(tokens * reached(experts, nodes))


def reached(experts: Experts, nodes: int) -> float:
    """The mean number of nodes, out of ``nodes`` with equal shares of the experts, that hold experts of one token."""
    groups = experts.groups if experts.active_groups < experts.groups else 1
    return _reached(experts.count, experts.active, groups, experts.active_groups, nodes)


@lru_cache(maxsize=4096)
def _reached(count: int, active: int, groups: int, active_groups: int, nodes: int) -> float:
    each, group = count // nodes, count // groups
    if groups == 1 or (each % group and group % each):
        return nodes * _hit(count, each, active)
    drawn = active_groups * group
    if each <= group:  # a node has a part of one group, or all of it
        return nodes * active_groups / groups * _hit(drawn, each, active)
    several = each // group
    ways = comb(groups, active_groups)
    return nodes * sum(
        comb(several, here)
        * comb(groups - several, active_groups - here)
        / ways
        * _hit(drawn, here * group, active)
        for here in range(min(several, active_groups) + 1)
    )


def _hit(drawn: int, some: int, active: int) -> float:
    """The probability that ``active`` draws out of ``drawn`` hit at least one of ``some``."""
    return 1 - comb(drawn - some, active) / comb(drawn, active)
