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


def bus_bandwidth(name: str, size: int = 16 * GIB) -> float:
    ours = links(name)
    ranks = ours.cluster.devices
    return 2 * (ranks - 1) / ranks * size / ours.seconds("all_reduce", size, ranks, 1)


def test_nccl_tests_on_hopper() -> None:
    """32 H100 with 3.2 Tb/s a node reach 324 GB/s; the smallest messages of 8 take tens of microseconds."""
    assert bus_bandwidth("32xH100") == pytest.approx(324e9, rel=0.03)
    assert 20e-6 < links("8xH100").seconds("all_reduce", 2**20, 8, 1) < 50e-6


def test_fewer_adapters_carry_less() -> None:
    whole = notation.find("32xH100")
    half = whole.model_copy(update={"nics": 4})
    size, both = GIB, []
    for cluster in (whole, half):
        both.append(Links(cluster, calibration.find(cluster)).seconds("all_reduce", size, 32, 1))
    assert both[1] == pytest.approx(2 * both[0], rel=0.1)


def test_groups_that_communicate_at_once_share_the_adapters() -> None:
    """One rank of each node: all eight of a node are in such a group, and together take what one large group takes."""
    cluster = notation.find("64xH100").model_copy(update={"nics": 2})
    ours = Links(cluster, calibration.find(cluster))
    one_of_eight = ours.seconds("all_gather", GIB // 8, 8, 8)
    assert one_of_eight == pytest.approx(ours.seconds("all_gather", GIB, 64, 1), rel=0.15)


def test_a_thin_spine_slows_rings_that_change_rails() -> None:
    cluster = notation.find("64xH100").model_copy(update={"across_rails": 0.25})
    thin, wide = Links(cluster, calibration.find(cluster)), links("64xH100")
    assert thin.seconds("all_gather", GIB, 64, 1) > 3 * wide.seconds("all_gather", GIB, 64, 1)
    assert thin.seconds("all_gather", GIB, 8, 8) == wide.seconds(
        "all_gather", GIB, 8, 8
    )  # each on its own rail
    assert thin.seconds("all_gather", GIB, 16, 1) == wide.seconds("all_gather", GIB, 16, 1)  # two nodes


def test_consumer_cards_copy_through_the_host() -> None:
    consumer, workstation = links("8xRTX3090"), links("8xA6000")
    assert consumer.cluster.device.host_link == workstation.cluster.device.host_link
    assert consumer.seconds("all_reduce", GIB, 8, 1) > 1.8 * workstation.seconds("all_reduce", GIB, 8, 1)


def test_a_bridge_joins_a_pair_and_no_more() -> None:
    ours = links("8xH100-NVL")
    pair, node = (ours.seconds("all_gather", GIB, ranks, 1) for ranks in (2, 8))
    assert node > 4 * pair
    assert ours.seconds("send", GIB, 8, 1) < ours.seconds(
        "send", GIB, 2, 8
    )  # within the node, not over the network


def test_a_small_node_has_an_adapter_of_its_own() -> None:
    assert links("4x1xRTX4090").network == pytest.approx(links("32xRTX4090").network)
    alone, shared = links("4x1xRTX4090"), links("32xRTX4090")
    assert shared.seconds("all_gather", GIB, 4, 8) > 6 * alone.seconds("all_gather", GIB, 4, 1)
