"""The order of nodes, and so of ranks: nodes joined by a fast link are adjacent. Needs no torch."""

from __future__ import annotations

import re

from shoal.facts.cluster import Cluster
from shoal.launch.nodes.messages import Status


def in_order(leader: int, there: dict[int, Status], cluster: Cluster) -> dict[int, Status]:
    """By name, as schedulers number them: in whole fast-link domains, the leader's first, and the leader first in it.

    Tensor ranks are neighbours, so they stay within a node, or within a domain of several (an NVL72 has 18 nodes).
    """
    size = max(1, cluster.fast_domain // cluster.devices_per_node)
    names = sorted(there, key=lambda number: (_natural(there[number].name), number))
    blocks = [names[begin : begin + size] for begin in range(0, len(names), size)]
    blocks.sort(key=lambda block: leader not in block)
    blocks[0].sort(key=lambda number: number != leader)
    return {number: there[number] for block in blocks for number in block}


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts ``node10`` after ``node9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
