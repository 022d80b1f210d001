"""What several nodes keep in their memories: copies of each other's, brought together again, never mixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.facts.layout import Layout
from shoal.parallel.mesh import Mesh
from shoal.train.checkpoint.manifest import NAME
from shoal.train.checkpoint.peers import SET_ASIDE, Peers, _newest, file_of
from shoal.train.checkpoint.place import Directory

SIZES = {file_of(0): 10, file_of(1): 20, NAME: 5}


def held(step: int, manifest: str, *files: str) -> tuple[int, str, dict[str, int], dict[str, str]]:
    lacking = {file: f"{file} is missing" for file in SIZES if file not in (*files, NAME)}
    return step, manifest, SIZES, lacking


def test_the_newest_that_is_whole_is_found_and_who_lacks_what() -> None:
    whole = held(4, "m4", file_of(0), file_of(1))
    assert _newest([[], []]) == (None, [])
    assert _newest([[whole], [whole]]) == ((4, "m4", []), [])
    # The second node is new: it lacks everything, and gets it from the first that has it.
    everything = [(file, size, 0, 1) for file, size in SIZES.items()]
    assert _newest([[whole], []]) == ((4, "m4", everything), [])
    # A later step of which some file is nowhere does not count, and is told of; an earlier one is not.
    found, useless = _newest([[held(3, "m3"), whole, held(5, "m5", file_of(0))], [whole]])
    assert found == (4, "m4", []) and useless == [(5, f"{file_of(1)} is missing")]
    # Each has what the other lacks.
    parted, _ = _newest([[held(5, "m5", file_of(0))], [held(5, "m5", file_of(1))]])
    assert parted == (5, "m5", [(file_of(1), 20, 1, 0), (file_of(0), 10, 0, 1)])
    # The same step, done twice: files of both are not mixed.
    twice, _ = _newest([[held(5, "one", file_of(0))], [held(5, "two", file_of(1)), whole]])
    assert twice is not None and twice[:2] == (4, "m4")
    # A manifest that cannot be read.
    torn = (6, "", {NAME: 0}, {NAME: "manifest.json cannot be read"})
    assert _newest([[whole, torn], [whole]]) == ((4, "m4", []), [(6, "manifest.json cannot be read")])


def test_a_share_is_copied_to_the_next_node_and_a_lost_one_gets_it_back(tmp_path: Path) -> None:
    found = run_ranks(4, _copy_and_bring, tmp_path)
    for rank, files in enumerate(found):
        node = rank // 2
        for number in range(4):
            # Shares are of different lengths, and some span several parts of a transfer.
            assert files[file_of(number)] == (number * 1000 + 7) * bytes([number]).hex(), (node, number)


def _copy_and_bring(rank: int, world: int, path: Path) -> dict[str, str]:
    from shoal.train.checkpoint import peers as module

    module.CHUNK = 512
    peers, place = _peers(rank, path)
    mesh, store = peers.mesh, peers.mesh.store
    content = bytes([rank]) * (rank * 1000 + 7)
    place.write(3, "first", file_of(rank), [memoryview(content)])
    peers.copy(3, memoryview(content))
    mesh.gather("")
    mesh.tell("")
    if rank == 0:
        (place.aside(3, "first") / "extra").touch()
        peers.commit_elsewhere(store, "commit", "manifest")
        place.commit(3, "first", "manifest")
    elif peers.leads:
        assert peers.commit_here(store, "commit", 3)
    mesh.gather("")
    mesh.tell("")
    if rank == 2:
        shutil.rmtree(place.path)
    sizes = {file_of(number): number * 1000 + 7 for number in range(4)} | {NAME: len("manifest")}
    missing = [(file, size, 0, 1) for file, size in sizes.items()]
    again = Peers(mesh, place, "second")
    again.bring(module.Sound(3, json.dumps("manifest"), missing))
    return {file.name: file.read_bytes().hex() for file in place.at(3).glob("*.bin")}


def test_a_node_that_has_no_room_holds_nobody_up(tmp_path: Path) -> None:
    """Its neighbours wait for its share, and it for theirs, whatever it can do with them."""
    for rank, (trouble, after) in enumerate(run_ranks(4, _copy_without_room, tmp_path)):
        assert trouble == ("no room" if rank == 2 else "")
        assert after == bytes([(rank - 2) % 4]).hex() * 2000


def _copy_without_room(rank: int, world: int, path: Path) -> tuple[str, str]:
    from shoal.train.checkpoint import peers as module

    module.CHUNK = 512
    peers, place = _peers(rank, path)
    write, trouble = place.write, ""

    def refuse(step: int, attempt: str, file: str, content: Iterator[memoryview]) -> str:
        next(content)
        raise OSError(28, "no room")

    if rank == 2:
        place.write = refuse
    try:
        peers.copy(3, memoryview(bytes([rank]) * 5000))
    except OSError as error:
        trouble = str(error.strerror)
    place.write = write
    peers.copy(4, memoryview(bytes([rank]) * 2000))  # nothing of the one before is left in between
    return trouble, (place.aside(4, "first") / file_of((rank - 2) % 4)).read_bytes().hex()


def test_what_the_launcher_has_set_aside_comes_back_from_no_node(tmp_path: Path) -> None:
    for found, left in run_ranks(4, _set_aside, tmp_path):
        assert found is None and left == []


def _set_aside(rank: int, world: int, path: Path) -> tuple[object, list[int]]:
    peers, place = _peers(rank, path)
    if peers.leads:
        for step in (7, 8, 9):
            place.write(step, "first", file_of(rank), [memoryview(b"x")])
            place.commit(step, "first", "no manifest")
    peers.mesh.gather("")
    peers.mesh.tell("")
    if rank == 0:
        peers.mesh.store.set(SET_ASIDE, json.dumps([7, 8]))
    peers.mesh.tell("")
    # The ninth was done on a node that was away, and the others have undone it.
    found, useless = peers.newest(8)
    assert not useless
    peers.mesh.gather("")
    peers.mesh.tell("")
    return found, place.committed()


def _peers(rank: int, path: Path) -> tuple[Peers, Directory]:
    store = dist.distributed_c10d._get_default_store()
    mesh = Mesh(Layout(dp=4), rank, torch.device("cpu"), store, nodes=2)
    place = Directory(path / f"node-{rank // 2}", durable=False)
    return Peers(mesh, place, "first"), place
