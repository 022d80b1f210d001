"""Collectives on links: what limits them where."""

from __future__ import annotations

import pytest

from shoal.facts import calibration
from shoal.facts.cluster import notation
from shoal.predict.time.links import Links

GIB = 2**30


def links(name: str) -> Links:
    cluster = notation.find(name)
    return Links(cluster, calibration.find(cluster))


def test_a_group_of_one_sends_nothing() -> None:
    assert links("64xH100").seconds("all_reduce", GIB, 1, 1) == 0.0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    ours = links("8xH100")
    both = sum(ours.seconds(op, GIB, 8, 1) for op in ("reduce_scatter", "all_gather"))
    assert ours.seconds("all_reduce", GIB, 8, 1) == pytest.approx(both, rel=0.01)


def test_within_a_node_a_ring_moves_all_but_one_part() -> None:
    ours = links("8xH100")
    expected = 7 / 8 * GIB / ours.fast
    assert ours.seconds("all_gather", GIB, 8, 1) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"])
def test_across_nodes_takes_longer(op: str) -> None:
    ours = links("64xH100")
    # Eight neighbours in a node; one of each of eight nodes.
    assert ours.seconds(op, GIB, 8, 8) > 2 * ours.seconds(op, GIB, 8, 1)


def test_several_ranks_of_a_node_help_each_other_out_of_it() -> None:
    ours = links("64xH100")
    assert ours.seconds("all_gather", GIB, 64, 1) < ours.seconds("all_gather", GIB, 8, 8)


def test_a_wider_domain_keeps_a_group_on_fast_links() -> None:
    wide, narrow = links("72xGB200"), links("72xB200")
    assert wide.seconds("all_reduce", GIB, 72, 1) < narrow.seconds("all_reduce", GIB, 72, 1)


def test_small_messages_cost_their_latency() -> None:
    ours = links("64xH100")
    assert ours.seconds("all_gather", 8, 8, 1) == pytest.approx(
        ours.calibration.fast.start + 7 * ours.calibration.fast.hop, rel=0.01
    )
    # A sum over many nodes goes up a tree.
    deep, wide = (links("4096xH100").seconds(op, 8, 512, 8) for op in ("all_reduce", "all_gather"))
    assert deep < wide
