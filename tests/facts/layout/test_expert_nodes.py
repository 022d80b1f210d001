"""Which ranks pass tokens on to which, and how many nodes a token reaches."""

from __future__ import annotations

from itertools import combinations

import pytest

from shoal.facts.expert_load import crossing, reached
from shoal.facts.layout import Layout
from shoal.facts.layout.expert_nodes import expert_nodes
from shoal.facts.model import Experts
from shoal.facts.model.presets import PRESETS


@pytest.mark.parametrize(
    ("layout", "domain", "across", "inside"),
    [
        ("dp=8,ep=8", None, (1, 1), (8, 1)),
        ("dp=8,ep=8", 8, (1, 1), (8, 1)),
        ("dp=64,ep=64", 8, (8, 8), (8, 1)),
        ("dp=16,tp=2,ep=16", 8, (4, 8), (4, 2)),
        ("dp=4,tp=8,ep=4", 8, (4, 8), (1, 8)),  # a tensor group fills a node
        ("dp=4,tp=16,ep=4", 8, (4, 16), (1, 16)),
        # 64 ranks that begin anywhere in domains of 72: eight in a row never lie in two.
        ("dp=128,ep=64", 72, (8, 8), (8, 1)),
        ("dp=3,tp=4,ep=3", 6, (3, 4), (1, 4)),
    ],
)
def test_ranks_of_a_node(
    layout: str, domain: int | None, across: tuple[int, int], inside: tuple[int, int]
) -> None:
    parsed = Layout.parse(layout)
    nodes, ranks = expert_nodes(parsed, domain, 2)
    assert (nodes.size, ranks.size) == (across[0], inside[0]) and nodes.size * ranks.size == parsed.ep
    assert (nodes.size == 1 or nodes.stride == across[1]) and (ranks.size == 1 or ranks.stride == inside[1])
    if domain is not None and domain % parsed.tp == 0:
        for first in range(0, parsed.world, ranks.size * parsed.tp):
            assert first // domain == (first + ranks.size * parsed.tp - 1) // domain


def test_one_expert_a_token_goes_straight_to_its_rank() -> None:
    assert expert_nodes(Layout.parse("dp=16,ep=16"), 8, 1).inside.size == 16


@pytest.mark.parametrize(
    ("experts", "nodes"),
    [
        (Experts(count=8, active=2, ffn=1), 2),
        (Experts(count=8, active=3, ffn=1), 4),
        (Experts(count=8, active=3, ffn=1, groups=4, active_groups=2), 2),
        (Experts(count=8, active=2, ffn=1, groups=2, active_groups=1), 4),
        (Experts(count=8, active=2, ffn=1, groups=4, active_groups=2), 4),
    ],
    ids=str,
)
def test_nodes_that_a_token_reaches(experts: Experts, nodes: int) -> None:
    """Against all choices of groups, and of experts in them, one after the other."""
    group, each = experts.count // experts.groups, experts.count // nodes
    found = []
    for groups in combinations(range(experts.groups), experts.active_groups):
        allowed = [one for one in range(experts.count) if one // group in groups]
        found += [len({one // each for one in chosen}) for chosen in combinations(allowed, experts.active)]
    assert reached(experts, nodes) == pytest.approx(sum(found) / len(found))
    assert crossing(experts, 1000, nodes) == round(1000 * sum(found) / len(found))


def test_a_limit_on_groups_limits_what_leaves_a_node() -> None:
    experts = PRESETS["deepseek-v3"].experts
    assert experts is not None and (experts.active, experts.groups, experts.active_groups) == (8, 8, 4)
    free = experts.model_copy(update={"groups": 1, "active_groups": 1})
    assert reached(experts, 1) == 1
    assert 3.5 < reached(experts, 8) <= 4 < 5 < reached(free, 8) < 8
    assert reached(free, 256) == pytest.approx(8)
