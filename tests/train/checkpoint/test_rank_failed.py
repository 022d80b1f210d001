"""A checkpoint is committed only if every rank's part of it was written: on real ranks, whichever of them is refused.

The kernel refuses a rank every byte beyond the first thousand of a file, as a full disk does, while it writes its part.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.ranks import run_ranks
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import make_state

from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.launch.local import prepared
from shoal.parallel.mesh import Mesh
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job, resolve
from shoal.train.checkpoint.node_memory import forget
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.checkpoint.peer_memory import Peers, file_of
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.storage import CheckpointStorage, DirectoryStorage
from shoal.train.commits import CommitFailed
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory

ATTEMPT = "one-1"
REFUSED = 2  # the step
FULL = "the disk is full"

# Where checkpoints lie, whose part is refused, and which part of the work that is.
CASES = [
    *(
        (place, rank, work)
        for place in ("directory", "bucket")
        for work in ("rows", "part")
        for rank in (0, 1)
    ),
    *(("nodes", rank, work) for work in ("part", "copy") for rank in (0, 1)),
    # The first rank commits last, so that what it has committed is everywhere.
    ("nodes", 1, "commit"),
]


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def inside(
    place: CheckpointStorage, method: str, around: Callable[..., AbstractContextManager[object]]
) -> None:
    """Let a place's method run inside of ``around(step, attempt, file, …)``."""
    original = getattr(place, method)

    def surrounded(*arguments: Any) -> Any:
        with around(*arguments):
            return original(*arguments)

    setattr(place, method, surrounded)


def refuse(place: CheckpointStorage, method: str, when: Callable[[int, str], bool]) -> None:
    """Let the disk be full inside of a place's method, where ``when(step, file)`` says so."""

    def around(step: int, attempt: str, file: str, *content: Any) -> AbstractContextManager[object]:
        return full_disk() if when(step, file) else nullcontext()

    inside(place, method, around)


def one_at_a_time(lock: threading.Lock, *places: CheckpointStorage) -> None:
    for place in places:
        inside(place, "write", lambda *arguments: lock)


def one_place(kind: str, folder: Path, rank: int) -> DirectoryStorage | ObjectStore:
    if kind == "bucket":
        return ObjectStore(f"file://{folder}/bucket")
    return DirectoryStorage(folder / f"node-{rank}" if kind == "nodes" else folder / "disk")


def save_thrice(rank: int, kind: str, refused: int, work: str, folder: Path) -> list[tuple[str, list[int]]]:
    """What became of three saves: the error, and which steps were committed then."""
    nodes = 2 if kind == "nodes" else 1
    # The same keys are set in every case.
    store = SignedStore(dist.distributed_c10d._get_default_store(), b"s" * 32).within(folder.name)
    mesh = Mesh(Layout(dp=2), rank, torch.device("cpu"), store, nodes=nodes)
    place = one_place(kind, folder, rank)
    peers = Peers(mesh, place, ATTEMPT) if isinstance(place, DirectoryStorage) and nodes > 1 else None
    settling = False

    def settle_rows() -> None:
        if settling:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == refused and work in ("part", "copy"):
        wanted = file_of(rank if work == "part" else 1 - rank)
        refuse(place, "write", lambda step, file: step == REFUSED and file == wanted)
    elif rank == refused and work == "commit":
        refuse(place, "commit", lambda step, manifest: step == REFUSED)
    state = make_state(small("tiny"), mesh=mesh)
    saver = Saver("disk", place, state.new_stage(), mesh, ATTEMPT, settle_rows, peers=peers)
    results = []
    for step in (1, REFUSED, 3):
        settling = rank == refused and work == "rows" and step == REFUSED
        saver.start(state.manifest(step, step, {}), state.states())
        saver.finish()
        (saved,) = saver.take_results()
        mesh.hosts.gather("")
        mesh.hosts.broadcast("")
        results.append((saved.error, place.committed()))
        mesh.hosts.gather("")
        mesh.hosts.broadcast("")
    saver.close()
    return results


def save_in_every_case(rank: int, world: int, folder: Path) -> list[list[tuple[str, list[int]]]]:
    return [save_thrice(rank, *case, folder / str(number)) for number, case in enumerate(CASES)]


def test_no_commit_without_every_ranks_part(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_in_every_case, tmp_path)
    for number, (kind, refused, work) in enumerate(CASES):
        case = f"{kind}, {work} of rank {refused}"
        errors = [error for error, _ in first[number]]
        assert errors[0] == errors[2] == "" and FULL in errors[1].lower(), case
        for rank, results in enumerate((first, second)):
            assert [steps for _, steps in results[number]] == [[1], [1], [1, 3]], (case, rank)
            place = one_place(kind, tmp_path / str(number), rank)
            for step in place.committed():
                Checkpoint(place, step).verify()
            # Nothing of the refused one is left to take up room.
            left = (tmp_path / str(number)).rglob(f"*step-{REFUSED:08d}*")
            assert [path for path in left if any(path.iterdir())] == [], case


# What a run makes of it.


def train_with_a_full_disk(
    rank: int, world: int, job: Job, path: Path, dataset: Path, refused: list[int]
) -> tuple[str, list[int]]:
    """A run whose last rank is refused its part of these steps on disk: its last error, the steps in memory."""
    store = SignedStore(dist.distributed_c10d._get_default_store(), b"s" * 32).within(path.name)
    mesh = Mesh(job.layout, rank, torch.device("cpu"), store)
    training = Training(job, RunDirectory(path), dataset, mesh)
    if rank == world - 1:
        refuse(training.commits.disk, "write", lambda step, file: step in refused)
        # A limit is the whole process's: what is written to memory at that moment would be refused too.
        one_at_a_time(threading.Lock(), training.commits.disk, training.commits.memory)
    trouble = ""
    try:
        training.run_to_end(bool)
    except CommitFailed as error:
        trouble = str(error)
        mesh.hosts.wait_for_first_rank()  # as the others do
    return trouble, training.run.memory().committed()


@pytest.mark.parametrize(("refused", "committed"), [((2, 3), [1, 4]), ((4,), [1, 2, 3])])
def test_a_run_goes_on_without_that_commit_or_says_that_its_last_one_is_missing(
    settings: Callable[..., list[str]], tmp_path: Path, refused: tuple[int, ...], committed: list[int]
) -> None:
    options = {"recipe__steps": 4, "checkpoint__every": 1, "checkpoint__keep": 9, "checkpoint__memory": 1}
    job = resolve(load(None, settings(**options), "dp=2").config)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.write_start(job, {}, {})
    dataset = prepared(job.config.data, Console(stderr=True))
    try:
        (trouble, memory), _ = run_ranks(2, train_with_a_full_disk, job, run.path, dataset, refused)
    finally:
        forget(run.id)
    last = 4 in refused
    assert trouble.startswith(f"rank 1: {FULL}") if last else not trouble
    assert run.disk.committed() == committed and memory == [3, 4]
    # Told once for as long as it lasts, and with what really is the last commit.
    (row,) = (row for row in read_rows(run.faults) if row["kind"] == "commit failed")
    before = refused[0] - 1
    assert row["step"] == refused[0] and f"rank 1: {FULL}" in row["action"]
    assert row["action"].endswith(f"the last commit is step {before}")
