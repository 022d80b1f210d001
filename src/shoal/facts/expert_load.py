"""How tokens spread over ranks that hold different experts: the busiest of them sets the pace; and over how many nodes
those of one token are.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from shoal.facts.model import Experts

# Times an even share, of a micro-batch and layer. An assumption, for no run of many expert ranks was measured here: a
# router that balances by a correction keeps single experts within some 4 % over whole batches (DeepSeek's loss-free
# balancing), one that balances by a loss alone lets the busiest have half as much again, and a rank's several experts
# even out some of what a micro-batch adds to that.
BUSIEST = 1.1


def busiest(ep: int) -> float:
    """What the busiest of ``ep`` ranks is sent, in even shares. A rank that has all experts has all their tokens."""
    return BUSIEST if ep > 1 else 1.0


def crossing(experts: Experts, tokens: int, nodes: int) -> int:
    """How many tokens are sent to nodes, once to each that has an expert of theirs: what even routing comes to."""
    return round(tokens * reached(experts, nodes))


def reached(experts: Experts, nodes: int) -> float:
    """Nodes that have experts of one token, of so many with equal parts of them: the mean over all choices that the
    router may make.
    """
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
    """How likely it is that of so many that are drawn from ``drawn`` at least one is one of ``some``."""
    return 1 - comb(drawn - some, active) / comb(drawn, active)
