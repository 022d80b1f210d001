"""Ranks where the machine is: nodes of one fast link stand together, ranks on the cores beside their device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shoal.facts.cluster.notation import find
from shoal.launch.nodes.messages import Status
from shoal.launch.nodes.order import in_order
from shoal.launch.numa import bind_to_numa

CPU = torch.device("cpu")


def nodes(*names: str) -> dict[int, Status]:
    """They joined in this order."""
    return {
        number: Status(name=name, host=name, process=1, devices=4) for number, name in enumerate(names, 1)
    }


def test_nodes_are_ordered_by_name_and_the_leader_is_first() -> None:
    there = nodes("n10", "n2", "n1", "n9")
    found = in_order(1, there, find("4x8xH100"))
    assert [one.name for one in found.values()] == ["n10", "n1", "n2", "n9"]


def test_nodes_of_a_fast_link_domain_stand_together_whoever_leads() -> None:
    """Domains of 72 devices are 18 nodes: no node of the first domain comes between those of the second."""
    cluster = find("36x4xGB200")
    assert cluster.fast_domain == 72
    there = nodes(*(f"gpu-{number:02d}" for number in range(36)))
    found = list(in_order(21, there, cluster))
    assert found[0] == 21 and set(found[:18]) == set(range(19, 37)) and found[18:] == list(range(1, 19))


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Eight cores that this process may use, and what it is bound to."""
    bound = set(range(8))

    def bind(process: int, cores: set[int]) -> None:
        bound.clear()
        bound.update(cores)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(bound), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", bind, raising=False)
    return bound


def sockets(place: Path, *lists: str) -> Path:
    """A machine of so many NUMA nodes, as Linux shows it."""
    for number, cores in enumerate(lists):
        folder = place / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    return place


@pytest.mark.parametrize(
    ("rank", "here", "cores"),
    [(0, 4, [0, 1, 4, 5]), (1, 4, [0, 1, 4, 5]), (2, 4, [2, 3, 6, 7]), (3, 4, [2, 3, 6, 7]), (0, 1, [])],
)
def test_ranks_on_cpus_share_out_the_sockets(
    rank: int, here: int, cores: list[int], tmp_path: Path, mine: set[int]
) -> None:
    system = sockets(tmp_path, "0-1,4-5", "2-3,6-7", "")
    assert bind_to_numa(CPU, rank, here, system) == cores
    assert mine == set(cores or range(8))


def test_what_a_scheduler_has_taken_away_stays_away(tmp_path: Path, mine: set[int]) -> None:
    mine -= {2, 3, 4, 5, 6, 7}
    assert bind_to_numa(CPU, 1, 2, sockets(tmp_path, "0-3", "4-7")) == []
    assert mine == {0, 1}


def test_a_machine_that_does_not_say_is_left_alone(tmp_path: Path, mine: set[int]) -> None:
    assert bind_to_numa(CPU, 1, 2, tmp_path) == [] and len(mine) == 8
