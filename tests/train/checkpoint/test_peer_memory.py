"""What several nodes keep in their memories: copies of each other's, brought together again, never mixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.facts.layout import Layout
from shoal.parallel.mesh import Mesh
from shoal.parallel.signed_store import SignedStore
from shoal.train.checkpoint.manifest import NAME
from shoal.train.checkpoint.peer_memory import Peers, _checked, _newest, file_of
from shoal.train.checkpoint.storage import DirectoryStorage

SECRET = b"s" * 32
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
    from shoal.train.checkpoint import peer_memory as module

    module.CHUNK = 512
    peers, place = _peers(rank, path)
    mesh, store = peers.mesh, peers.mesh.hosts.store
    content = bytes([rank]) * (rank * 1000 + 7)
    place.write(3, "first", file_of(rank), [memoryview(content)])
    peers.copy(3, memoryview(content))
    mesh.hosts.gather("")
    mesh.hosts.broadcast("")
    if rank == 0:
        (place.aside(3, "first") / "extra").touch()
        peers.commit_elsewhere(store, "commit", "manifest")
        place.commit(3, "first", "manifest")
    elif peers.leads:
        assert peers.commit_here(store, "commit", 3)
    mesh.hosts.gather("")
    mesh.hosts.broadcast("")
    if rank == 2:
        shutil.rmtree(place.path)
    sizes = {file_of(number): number * 1000 + 7 for number in range(4)} | {NAME: len("manifest")}
    missing = [(file, size, 0, 1) for file, size in sizes.items()]
    again = Peers(mesh, place, "second")
    again.bring(module.IntactCheckpoint(3, json.dumps("manifest"), missing))
    return {file.name: file.read_bytes().hex() for file in place.at(3).glob("*.bin")}


def test_a_node_that_has_no_room_holds_nobody_up(tmp_path: Path) -> None:
    """Its neighbours wait for its share, and it for theirs, whatever it can do with them."""
    for rank, (trouble, after) in enumerate(run_ranks(4, _copy_without_room, tmp_path)):
        assert trouble == ("no room" if rank == 2 else "")
        assert after == bytes([(rank - 2) % 4]).hex() * 2000


def _copy_without_room(rank: int, world: int, path: Path) -> tuple[str, str]:
    from shoal.train.checkpoint import peer_memory as module

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
    peers, place = _peers(rank, path, set_aside=(7, 8))
    if peers.leads:
        for step in (7, 8, 9):
            place.write(step, "first", file_of(rank), [memoryview(b"x")])
            place.commit(step, "first", "no manifest")
    peers.mesh.hosts.gather("")
    peers.mesh.hosts.broadcast("")
    # The ninth was done on a node that was away, and the others have undone it.
    found, useless = peers.newest(8)
    assert not useless
    peers.mesh.hosts.gather("")
    peers.mesh.hosts.broadcast("")
    return found, place.committed()


def test_a_stranger_names_no_file(tmp_path: Path) -> None:
    """Another user of the machine, who has written to the store before the first rank tells what it has found."""
    victim = tmp_path / "victim"
    victim.write_text("all of it")
    assert run_ranks(4, _told_by_a_stranger, tmp_path, victim) == [None] * 4
    assert victim.read_text() == "all of it"


def _told_by_a_stranger(rank: int, world: int, path: Path, victim: Path) -> object:
    peers, place = _peers(rank, path)
    mesh = peers.mesh
    if peers.leads:
        place.write(3, "first", file_of(rank), [memoryview(b"x")])
        place.commit(3, "first", "no manifest")
    if rank == 3:
        stranger = dist.distributed_c10d._get_default_store()
        hostile = json.dumps([[3, "hash", [[str(victim), 0, 1, 0], [NAME, 0, 1, 0]]], [[3, "why"]]])
        for number in range(3, 20):
            stranger.set(f"told-{number}", hostile)
        stranger.check(["told-3"])
    mesh.hosts.gather("")
    mesh.hosts.broadcast("")
    sound, useless = peers.newest(8)
    if sound is not None:
        peers.bring(sound)
    # What was really found: a manifest that cannot be read.
    assert [step for step, _ in useless] == [3]
    return sound


@pytest.mark.parametrize(
    "found",
    [
        [[3, "m", [["/etc/passwd", 1, 0, 1]]], []],
        [[3, "m", [["../x", 1, 0, 1]]], []],
        [[3, "m", [[file_of(0), -1, 0, 1]]], []],
        [[3, "m", [[file_of(0), 1 << 60, 0, 1]]], []],
        [[3, "m", [[file_of(0), 1, 0, 2]]], []],
        [["3/../4", "m", []], []],
        [[-3, "m", []], []],
        [None, [["..", "why"]]],
    ],
)
def test_what_was_told_is_checked_before_it_becomes_a_path(found: object) -> None:
    with pytest.raises(RuntimeError):
        _checked(found, nodes=2)


def test_no_name_leads_out_of_a_checkpoint(tmp_path: Path) -> None:
    victim = tmp_path / "victim" / "thesis-1"
    victim.mkdir(parents=True)
    (victim / "text").write_text("all of it")
    place = DirectoryStorage(tmp_path / "run" / "checkpoints", durable=False)
    for attempt, file in (
        ("x/../../../victim/thesis-1", file_of(0)),
        ("first", str(victim / "text")),
        ("first", "../../../victim/thesis-1/text"),
        ("..", file_of(0)),
        ("", file_of(0)),
    ):
        for act in (
            lambda attempt=attempt, file=file: place.write(1, attempt, file, [memoryview(b"")]),
            lambda attempt=attempt, file=file: place.commit(1, attempt if file == file_of(0) else "..", "{}"),
            lambda attempt=attempt, file=file: place.abandon(1, attempt if file == file_of(0) else "../.."),
        ):
            with pytest.raises(ValueError, match="is no name"):
                act()
    assert (victim / "text").read_text() == "all of it" and not place.path.exists()


def _peers(rank: int, path: Path, set_aside: tuple[int, ...] = ()) -> tuple[Peers, DirectoryStorage]:
    store = SignedStore(dist.distributed_c10d._get_default_store(), SECRET)
    mesh = Mesh(Layout(dp=4), rank, torch.device("cpu"), store, nodes=2)
    place = DirectoryStorage(path / f"node-{rank // 2}", durable=False)
    return Peers(mesh, place, "first", set_aside), place
