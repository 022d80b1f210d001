"""Pair nodes for measurements, in rounds, so that every node has several partners and a bad one stands out."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]
# Partners per node. With two, one could be bad as well; more would only take longer.
PARTNERS = 3


def rounds(nodes: Sequence[int], most: int = PARTNERS) -> list[list[Pair]]:
    """In each round every node is in at most one pair, and no pair repeats: the first rounds of a tournament."""
    players: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    # With an odd number, one node sits out in every round.
    for turn in range(min(most, max(0, len(players) - 1))):
        fixed, rest = players[-1], players[:-1]
        rest = rest[turn:] + rest[:turn]
        circle = [fixed, *rest]
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
    return found


def partners(all_rounds: Sequence[Sequence[Pair]], node: int) -> list[int | None]:
    """A node's partner in each round; None if it has none."""
    return [next((a + b - node for a, b in pairs if node in (a, b)), None) for pairs in all_rounds]
