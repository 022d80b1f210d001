"""Hosts of many ranks in a tree: the sums and texts of one group, with a few sockets."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.launch.rendezvous import connect, open_store
from shoal.parallel.control_tree import ControlTree, members, sockets
from shoal.parallel.gathered_texts import gather_texts
from shoal.parallel.hosts import HostGroup


def _talk(rank: int, world: int) -> tuple[list[int], list[float], float, list[str], int]:
    hosts = HostGroup(rank, world, ControlTree(rank, world, timedelta(seconds=60), fan=2), None)
    assert isinstance(hosts.group, ControlTree)
    sums = hosts.sum_integers([rank, 1])
    values = hosts.all_gather_values(torch.tensor([rank, rank * 0.5], dtype=torch.float64)).tolist()
    texts = hosts.all_gather("é" * rank)
    return sums, values, hosts.largest(float(rank)), texts, len(hosts.group.levels)


def test_a_tree_says_what_one_group_says() -> None:
    world = 7
    found = run_ranks(world, _talk)
    values = [number for rank in range(world) for number in (rank, rank * 0.5)]
    for sums, gathered, largest, texts, _ in found:
        assert sums == [21, 7] and gathered == values and largest == 6.0
        assert texts == ["é" * rank for rank in range(world)]
    assert [levels for *_, levels in found] == [len(members(rank, world, 2)) for rank in range(world)]


def test_no_rank_of_many_has_more_than_a_few_sockets() -> None:
    for world in (65, 100, 1000, 1023, 2047 * 8, 16384, 65536):
        assert max(sockets(rank, world) for rank in range(0, world, 16)) <= 60, world
        assert sockets(world - 1, world) <= 60
    assert sockets(0, 64) == 63 and sockets(5, 16384) == 15 and sockets(0, 16384) == 48
    # Everyone is in the tree, and each group has the same members whoever asks.
    world = 300
    groups = {tuple(group) for rank in range(world) for group in members(rank, world)}
    assert {rank for group in groups for rank in group} == set(range(world))
    for group in groups:
        assert all(list(group) in members(rank, world) for rank in group)


def test_texts_of_all_ranks_come_in_order_and_none_reads_many() -> None:
    store, _, port = open_store("127.0.0.1", 20)
    world, found, reads = 23, {}, {}

    def rank(number: int) -> None:
        mine = connect(port, store.secret, 20)
        wait, asked = mine.wait_for, []
        mine.wait_for = lambda keys, patience: asked.extend(keys) or wait(keys, patience)  # type: ignore[assignment]
        found[number] = gather_texts(mine, number, world, "key", f'"{number}', timedelta(seconds=20), fan=3)
        reads[number] = len(asked)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == [f'"{number}' for number in range(world)]
    assert all(found[number] == [] for number in range(1, world)) and max(reads.values()) <= 6


def _linked(rank: int, world: int) -> int:
    """How many sockets a rank holds for a tree, as the machine counts them."""
    before = _sockets_here()
    tree = ControlTree(rank, world, timedelta(seconds=60), fan=2)
    tree.all_reduce(torch.ones(1), dist.ReduceOp.SUM)
    return _sockets_here() - before


def _sockets_here() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found += str(entry.readlink()).startswith("socket:")
    return found


def test_a_rank_holds_as_many_sockets_as_it_has_neighbours_in_the_tree() -> None:
    world = 6
    held = run_ranks(world, _linked)
    for rank, count in enumerate(held):
        groups = members(rank, world, 2)
        # One for each neighbour, and one where each group listens.
        assert count <= sum(len(group) - 1 for group in groups) + len(groups), (rank, held)
