"""What differs between nodes is found, and the node that differs is named; what nodes agree on is one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.launch.inspection.compare import ClusterCheck, Inspected, Seen, compare, outliers
from shoal.launch.inspection.node import NodeReport
from shoal.launch.inspection.pairs import partners, rounds

GB = 1e9
WELL = NodeReport(
    name="",
    host="host",
    address="10.0.0.1",
    port=4000,
    device="H100",
    devices=8,
    memory=79.6,
    host_memory=2000.0,
    cores=96,
    versions={"Shoal": "0.1.0", "torch": "2.13.0", "NCCL": "2.27.3", "driver": "570.1"},
    limits={"open files": 65536},
)


def figures(inside: float = 400 * GB, pairs: dict[str, float] | None = None) -> dict[str, Any]:
    return {"inside": inside, "pairs": pairs or {}, "together": 40 * GB, "trouble": {}}


def four(**more: dict[str, Any]) -> Inspected:
    """Nodes n0 to n3, all well but for what ``more`` says of one."""
    nodes = range(4)
    reports = {node: replace(WELL, **{"name": f"n{node}", **more.get(f"n{node}", {})}) for node in nodes}
    links = {
        node: [figures(pairs={str(other): 45 * GB for other in nodes if other != node}) for _ in range(8)]
        for node in nodes
    }
    return Inspected(
        4, reports, {node: (0.001 * node, 0.0005) for node in nodes}, {node: Seen() for node in nodes}, links
    )


def compared(heard: Inspected, shared: bool = True) -> dict[str, ClusterCheck]:
    return {check.name: check for check in compare(heard, shared, 450 * GB, 50 * GB)}


def test_nodes_that_are_alike_are_ready() -> None:
    found = compared(four())
    assert {check.status for check in found.values()} == {"ok"}
    assert found["devices"].detail == "8 x H100 on each"
    assert found["links between nodes"].detail == "45 GB/s, 90% of the catalogue's 50 GB/s"
    assert found["clocks"].detail == "within 2 ms" and outliers([*found.values()], 4) == []


@pytest.mark.parametrize(
    ("what", "more", "status", "said"),
    [
        (
            "torch",
            {"versions": {**WELL.versions, "torch": "2.12.0"}},
            "failed",
            "2.12.0 on n2; 2.13.0 on n0 n1 n3",
        ),
        ("Shoal", {"versions": {**WELL.versions, "Shoal": "0.0.9"}}, "failed", "0.0.9 on n2"),
        ("driver", {"versions": {**WELL.versions, "driver": "550.9"}}, "warning", "550.9 on n2"),
        ("devices", {"devices": 7}, "failed", "7 x H100 on n2; 8 x H100 on n0 n1 n3"),
        ("device memory", {"memory": 39.5}, "warning", "39.5 on n2; the median is 79.6 GiB"),
        ("host memory", {"host_memory": 1000.0}, "warning", "1000 on n2"),
        ("limit of open files", {"limits": {"open files": 1024}}, "warning", "1024 on n2; 65536 elsewhere"),
        (
            "disk",
            {"checks": [{"name": "disk", "status": "failed", "detail": "0.1 GiB free", "fix": "free some"}]},
            "failed",
            "n2: 0.1 GiB free",
        ),
    ],
)
def test_the_node_that_differs_is_named(what: str, more: dict[str, Any], status: str, said: str) -> None:
    found = compared(four(n2=more))
    odd = [check for check in found.values() if check.status != "ok"]
    assert [check.name for check in odd] == [what] and odd[0].fix
    assert (odd[0].status, odd[0].nodes) == (status, ("n2",)) and said in odd[0].detail
    assert outliers(odd, 4) == (["n2"] if status == "failed" else [])


def test_of_two_nodes_that_differ_neither_is_the_wrong_one() -> None:
    heard = four(n0={"devices": 4})
    two = Inspected(2, {node: heard.reports[node] for node in (0, 1)})
    found = compared(two)
    assert found["devices"].status == "failed" and found["devices"].nodes == ()


def test_a_clock_that_is_off_is_told_from_a_slow_answer() -> None:
    heard = four()
    heard.offsets = {0: (0.0, 0.0), 1: (0.01, 0.01), 2: (-3.0, 0.01), 3: (2.0, 1.9)}
    found = compared(heard)["clocks"]
    assert found.status == "failed" and found.nodes == ("n2",) and "n2 by -3.0 s" in found.detail


def test_a_directory_that_is_not_shared_and_a_lock_that_does_not_hold() -> None:
    heard = four()
    heard.seen[3] = Seen(shared="node n3 does not see what the first node has written to /runs: No such file")
    heard.seen[1] = Seen(locked=False)
    found = compared(heard)
    assert found["shared directory"].nodes == ("n3",) and found["locks"].nodes == ("n1",)
    assert "shared directory" not in compared(heard, shared=False)


def test_a_node_that_does_not_come_and_one_that_others_do_not_reach() -> None:
    heard = four()
    del heard.reports[3], heard.seen[3], heard.links[3], heard.offsets[3]
    heard.names = {3: "gpu-7"}
    found = compared(heard)
    assert found["nodes"].status == "failed" and found["nodes"].nodes == ("gpu-7",)
    # One way between two is theirs; a node that several do not reach is the one.
    heard = four()
    heard.seen[0].unreached = {"1": "refused"}
    assert compared(heard)["ports"].nodes == ()
    heard.seen[2].unreached = {"1": "refused"}
    found = compared(heard)
    assert found["ports"].nodes == ("n1",) and "n1 and n0 n2 do not reach each other" in found["ports"].detail


def test_a_slow_node_is_told_from_its_partners() -> None:
    """All of a slow node's pairs are slow, and one pair of each other's is."""
    heard = four()
    for node in range(4):
        for rank in heard.links[node]:
            rank["pairs"] = {
                str(other): 2 * GB if 2 in (node, other) else 45 * GB for other in range(4) if other != node
            }
    found = compared(heard)["links between nodes"]
    assert found.status == "failed" and found.nodes == ("n2",)
    assert found.detail.startswith("2 GB/s on n2; the median node has 45 GB/s, 90% of")
    # One adapter of eight.
    heard = four()
    heard.links[1][5] = figures(pairs={"0": 3 * GB, "2": 3 * GB, "3": 3 * GB})
    assert compared(heard)["links between nodes"].nodes == ("n1",)
    heard = four()
    heard.links[3][0] = figures(inside=90 * GB, pairs=heard.links[3][0]["pairs"])
    assert compared(heard)["links inside a node"].nodes == ("n3",)


def test_where_all_are_slow_the_catalogue_tells() -> None:
    heard = four()
    for node in range(4):
        for rank in heard.links[node]:
            rank["pairs"] = dict.fromkeys(rank["pairs"], 5 * GB)
    found = compared(heard)["links between nodes"]
    assert (found.status, found.nodes) == ("warning", ())
    assert found.detail == "5 GB/s, 10% of the catalogue's 50 GB/s"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_every_node_has_partners_and_no_pair_comes_twice(count: int) -> None:
    found = rounds(range(10, 10 + count))
    pairs = [pair for one in found for pair in one]
    assert len(set(pairs)) == len(pairs)
    for one in found:
        there = [node for pair in one for node in pair]
        assert len(set(there)) == len(there)
    for node in range(10, 10 + count):
        mine = [other for other in partners(found, node) if other is not None]
        assert min(count - 1, 2) <= len(mine) <= 3 and len(set(mine)) == len(mine)


def test_a_busy_node_is_named_and_its_cpus_are_not_taken_for_a_slow_link() -> None:
    assert compared(four(n2={"load": 90.0}))["load"].status == "ok"
    heard = four(n2={"load": 300.0})
    heard.links[2] = [figures(pairs={str(other): 20 * GB for other in (0, 1, 3)}) for _ in range(8)]
    found = compared(heard)
    assert found["load"].detail == "300 on 96 cores of n2 over the last minute"
    assert (found["load"].status, found["load"].nodes) == ("warning", ("n2",))
    # What GPUs send does not wait for cores.
    assert found["links between nodes"].status == "failed"
    on_cpus = {node: replace(one, devices=0) for node, one in heard.reports.items()}
    found = compared(replace(heard, reports=on_cpus))
    assert (found["links between nodes"].status, found["links between nodes"].nodes) == ("warning", ("n2",))
    assert outliers([*found.values()], 4) == []
    # A load of three times its cores does not explain a link that is ten times slower.
    heard.links[2] = [figures(pairs={str(other): 4 * GB for other in (0, 1, 3)}) for _ in range(8)]
    assert compared(replace(heard, reports=on_cpus))["links between nodes"].status == "failed"
    heard.links[2] = [figures(pairs={str(other): 20 * GB for other in (0, 1, 3)}) for _ in range(8)]
    rested = {node: replace(one, load=1.0) for node, one in on_cpus.items()}
    assert compared(replace(heard, reports=rested))["links between nodes"].status == "failed"
