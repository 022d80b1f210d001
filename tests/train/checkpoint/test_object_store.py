"""Places for checkpoints: what a directory promises, an object store keeps too, with a manifest for a rename."""

from __future__ import annotations

import json
import os
import pickle
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem
from tests.conftest import Train, after_steps

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch.report import FINISHED, STOPPED
from shoal.observe.flight_recorder import FlightReader
from shoal.train.checkpoint import object_store as buckets
from shoal.train.checkpoint.manifest import Damaged, Manifest, StoredPiece
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.retention import Keeper
from shoal.train.checkpoint.storage import CheckpointStorage, DirectoryStorage, Unreachable
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory

MakeTraining = Callable[..., Training]


@pytest.fixture
def memory() -> Iterator[str]:
    """A store in this process, and nothing in it."""
    store = MemoryFileSystem()
    store.store.clear()
    yield "memory://bucket/runs"
    store.store.clear()


@pytest.fixture(params=["directory", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> CheckpointStorage:
    if request.param == "directory":
        return DirectoryStorage(tmp_path / "checkpoints")
    return ObjectStore(f"{memory}/run" if request.param == "memory" else f"file://{tmp_path}/bucket/runs/run")


@pytest.fixture
def bucket(memory: str) -> ObjectStore:
    return ObjectStore(f"{memory}/run")


def upload(place: CheckpointStorage, step: int, attempt: str, values: bytes) -> Manifest:
    """What two ranks write of a tensor of float32, and the manifest that would commit it."""
    half = len(values) // 8 * 4
    pieces = []
    for rank, part in enumerate((values[:half], values[half:])):
        middle = len(part) // 2
        chunks = [memoryview(part)[:middle], memoryview(part)[middle:]]
        file = place.write(step, attempt, f"rank-{rank:05d}.bin", iter(chunks))
        pieces.append(
            StoredPiece(
                tensor="w",
                state="weight",
                dtype="float32",
                offset=(rank * half // 4,),
                size=(len(part) // 4,),
                file=file,
                position=0,
                bytes=len(part),
                hash=blake3(part).hexdigest(),
            )
        )
    return Manifest(
        step=step,
        samples=step,
        model={},
        identity={},
        recipe="",
        scalars={},
        shapes={"w": (len(values) // 4,)},
        pieces=tuple(pieces),
    )


def commit(
    place: CheckpointStorage, step: int, attempt: str = "one-1", values: bytes = bytes(range(64))
) -> Manifest:
    manifest = upload(place, step, attempt, values)
    place.commit(step, attempt, manifest.to_text())
    return manifest


def content(place: CheckpointStorage, step: int) -> bytes:
    return bytes(Checkpoint(place, step).tensor("weight", "w").numpy().tobytes())


def objects(bucket: ObjectStore) -> list[str]:
    """Everything below a bucket's URL."""
    found = bucket.files.find(bucket.root)
    return sorted(path.removeprefix(bucket.root + "/") for path in found)


def change(bucket: ObjectStore, path: str, edit: Callable[[bytes], bytes]) -> None:
    whole = f"{bucket.root}/{path}"
    bucket.files.pipe_file(whole, edit(bucket.files.cat_file(whole)))


SECRET = "wJalrXUtnFEMI7MDENGbPxRfiCYEXAMPLE"


@pytest.mark.parametrize(
    "url",
    [
        f"s3::key={SECRET}",
        f"s3::key={SECRET},secret={SECRET}://bucket/runs",
        f"simplecache::s3://bucket/runs?token={SECRET}",
        f"s3://me:{SECRET}@bucket/runs",
        f"s3://{SECRET}@bucket/a b",
        f"key={SECRET}",
        f"s3://bucket/runs#{SECRET}",
        f"s3://bucket/runs?{SECRET}",
        f":{SECRET}",
    ],
)
def test_what_is_refused_is_not_repeated_where_it_may_be_a_secret(url: str) -> None:
    with pytest.raises(BadInput) as refused:
        ObjectStore(url)
    assert SECRET not in str(refused.value) and "checkpoint.to" in str(refused.value)
    with pytest.raises(BadInput) as refused:
        load(None, [f"checkpoint.to={url}", "checkpoint.to.more=1", f"run.environment=['TEAM={SECRET}']"])
    assert SECRET not in str(refused.value)


def test_directories_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        bucket = ObjectStore(f"file://{tmp_path}/a/deep/run")
        bucket.check()
        commit(bucket, 3)
        bucket.move(bucket.beside(".old-1"))
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "a").rglob("*") if path.is_dir()]
    assert len(made) >= 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", *made)} == {0o700}


# What every place promises.


def test_what_is_committed_is_read_back(place: CheckpointStorage) -> None:
    assert place.committed() == []
    for step in (7, 100, 123456789):
        commit(place, step, values=bytes([step % 251]) * 64)
    assert place.committed() == [7, 100, 123456789]
    assert content(place, 100) == bytes([100]) * 64
    file = Checkpoint(place, 100).manifest.pieces[1].file
    assert place.size(100, file) == 32
    into = bytearray(5)
    place.read(100, file, 27, memoryview(into))
    assert into == bytes([100]) * 5
    with pytest.raises(Damaged):
        place.read(100, file, 28, memoryview(bytearray(5)))
    for missing in (lambda: place.size(100, "rank-00009.bin"), lambda: place.read_manifest(8)):
        with pytest.raises(Damaged, match="missing"):
            missing()
    assert "step-00000100" in place.name(100)


def test_without_a_commit_there_is_nothing(place: CheckpointStorage) -> None:
    commit(place, 2)
    upload(place, 4, "dead-1", bytes(64))
    assert place.committed() == [2]
    place.clear()
    assert place.committed() == [2] and content(place, 2) == bytes(range(64))
    upload(place, 4, "two-1", bytes(64))
    place.abandon(4, "two-1")
    assert place.committed() == [2]
    place.abandon(6, "never-began")
    with pytest.raises(Damaged, match="missing"):
        Checkpoint(place, 4)


def test_attempts_do_not_mix(place: CheckpointStorage) -> None:
    """A dead attempt had written more ranks of the same step; and a later one commits a step again."""
    upload(place, 4, "dead-1", bytes([1]) * 64)
    place.write(4, "dead-1", "rank-00002.bin", [memoryview(b"longer world")])
    commit(place, 4, "two-1", bytes([2]) * 64)
    assert content(place, 4) == bytes([2]) * 64
    commit(place, 4, "two-2", bytes([3]) * 64)
    assert content(place, 4) == bytes([3]) * 64
    place.clear()
    assert place.committed() == [4] and content(place, 4) == bytes([3]) * 64


def test_a_removed_checkpoint_is_gone_and_the_others_are_not(place: CheckpointStorage) -> None:
    for step in (1, 2, 3, 10):
        commit(place, step)
    Keeper(place, keep=2).tidy()
    assert place.committed() == [3, 10]
    Keeper(place, keep=1, every=3).tidy()
    assert place.committed() == [3, 10]
    place.remove(3)
    assert place.committed() == [10]
    content(place, 10)


def test_what_is_damaged_is_set_aside_and_the_step_can_be_done_again(place: CheckpointStorage) -> None:
    commit(place, 2)
    for attempt in ("one-1", "two-1"):
        commit(place, 4, attempt)
        place.set_aside(4, f"a bit of {attempt} has flipped")
        assert place.committed() == [2]
        place.clear()
    commit(place, 4, "three-1", bytes([3]) * 64)
    assert place.committed() == [2, 4] and content(place, 4) == bytes([3]) * 64
    place.remove(4)
    assert place.committed() == [2]


def test_places_are_told_apart_and_travel(place: CheckpointStorage) -> None:
    again = pickle.loads(pickle.dumps(place))
    assert again == place and hash(again) == hash(place)
    commit(place, 2)
    assert again.committed() == [2]


# What is special about a store.


def test_the_manifest_is_the_commit_and_names_files_of_its_attempt(bucket: ObjectStore) -> None:
    upload(bucket, 4, "dead-1", bytes(64))
    manifest = upload(bucket, 4, "two-1", bytes(64))
    names = [piece.file for piece in manifest.pieces]
    assert names == ["rank-00000-two-1.bin", "rank-00001-two-1.bin"]
    assert bucket.committed() == []
    bucket.commit(4, "two-1", manifest.to_text())
    assert objects(bucket) == [f"step-00000004/{name}" for name in ("manifest.json", *names)]
    bucket.remove(4)
    assert objects(bucket) == []


def test_only_what_we_wrote_is_ever_deleted(bucket: ObjectStore) -> None:
    strange = [
        "notes.txt",
        "step-00000004/notes.txt",
        "step-00000004/rank-00000.bin",
        "step-4/rank-00000-a-1.bin",
    ]
    for path in strange:
        bucket.files.pipe_file(f"{bucket.root}/{path}", b"mine")
    neighbour = ObjectStore(bucket.url + "-2")
    commit(neighbour, 4)
    upload(bucket, 4, "dead-1", bytes(64))
    bucket.clear()
    assert objects(bucket) == sorted(strange)
    commit(bucket, 4)
    bucket.remove(4)
    assert objects(bucket) == sorted(strange)
    assert content(neighbour, 4)


def test_nothing_that_was_set_aside_is_lost(bucket: ObjectStore) -> None:
    commit(bucket, 4, "one-1")
    bucket.set_aside(4, "first")
    commit(bucket, 4, "two-1")
    bucket.set_aside(4, "second")
    upload(bucket, 4, "dead-1", bytes(64))
    bucket.clear()
    commit(bucket, 4, "three-1")
    bucket.remove(4)
    bucket.set_aside(4, "nothing is there to be set aside")
    found = [path.removeprefix("step-00000004/") for path in objects(bucket)]
    assert {name for name in found if "rank" not in name} == {
        "damaged-manifest.json",
        "damaged-manifest-1.json",
        "reason.txt",
        "reason-1.txt",
    }
    assert {"rank-00001-one-1.bin", "rank-00001-two-1.bin"} <= set(found)
    assert not any("three" in name for name in found)
    assert bucket.files.cat_file(f"{bucket.root}/step-00000004/reason-1.txt") == b"second\n"


def test_torn_and_damaged_checkpoints_never_load(bucket: ObjectStore) -> None:
    def flip(content: bytes) -> bytes:
        return content[:5] + bytes([content[5] ^ 1]) + content[6:]

    edits: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("rank-00000-one-1.bin", flip),
        ("rank-00000-one-1.bin", lambda content: content[:-1]),
        ("rank-00000-one-1.bin", lambda content: content + b"x"),
        ("manifest.json", flip),
        ("manifest.json", lambda content: content[: len(content) // 2]),
        ("manifest.json", lambda content: b""),
    ]
    for file, edit in edits:
        commit(bucket, 4)
        change(bucket, f"step-00000004/{file}", edit)
        with pytest.raises(Damaged):
            Checkpoint(bucket, 4).verify()
    # The manifest of an attempt that died, which arrived when its files had been cleared away.
    commit(bucket, 4)
    late = upload(bucket, 4, "dead-1", bytes(64))
    bucket.abandon(4, "dead-1")
    bucket.files.pipe_file(f"{bucket.root}/step-00000004/manifest.json", late.to_text().encode())
    with pytest.raises(Damaged, match="missing"):
        Checkpoint(bucket, 4)


def test_a_removal_that_is_interrupted_leaves_no_checkpoint(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(bucket, 4)

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "rm", interrupted)
        with pytest.raises(Unreachable):
            bucket.remove(4)
    assert bucket.committed() == [] and len(objects(bucket)) == 2
    bucket.clear()
    assert objects(bucket) == []


def test_a_commit_that_was_made_but_not_answered_is_undone_first(bucket: ObjectStore) -> None:
    commit(bucket, 2, "one-1")
    commit(bucket, 4, "one-1")
    bucket.abandon(4, "one-1")
    assert bucket.committed() == [2]
    assert not [path for path in objects(bucket) if path.startswith("step-00000004")]
    bucket.abandon(2, "another-1")
    assert content(bucket, 2)


def test_a_store_that_does_not_answer_says_nothing_of_what_is_there(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(bucket, 4)
    checkpoint = Checkpoint(bucket, 4)

    def silent(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no answer")

    for method in ("cat_file", "info", "ls", "_open", "rm"):
        monkeypatch.setattr(MemoryFileSystem, method, silent)
    file = checkpoint.manifest.pieces[0].file
    asked: list[Callable[[], Any]] = [
        bucket.committed,
        bucket.clear,
        checkpoint.verify,
        lambda: bucket.read_manifest(4),
        lambda: bucket.read(4, file, 0, memoryview(bytearray(1))),
        lambda: bucket.write(6, "one-1", "rank-00000.bin", []),
        lambda: bucket.remove(4),
        lambda: bucket.set_aside(4, "?"),
        lambda: bucket.abandon(4, "one-1"),
        lambda: commit(bucket, 6),
    ]
    for ask in asked:
        with pytest.raises(Unreachable, match="memory://bucket/runs/run: RuntimeError: no answer"):
            ask()
    monkeypatch.undo()
    assert bucket.committed() == [4] and content(bucket, 4)


def test_a_file_that_could_not_be_written_whole_is_not_completed(bucket: ObjectStore) -> None:
    """On a store that takes parts: fsspec would complete the file with what there is when it is closed."""

    class Parts(fsspec.spec.AbstractBufferedFile):
        completed = discarded = False

        def _upload_chunk(self, final: bool = False) -> None:
            self.completed |= final

        def discard(self) -> None:
            self.discarded = True

    def torn() -> Iterator[memoryview]:
        yield memoryview(b"beginning")
        raise OSError(28, "No space left on device")

    handle = Parts(bucket.files, "/bucket/x", "wb")
    bucket.files.open = lambda *arguments: handle  # type: ignore[method-assign]
    try:
        with pytest.raises(OSError, match="No space"):
            bucket.write(4, "one-1", "rank-00000.bin", torn())
    finally:
        del bucket.files.open
    assert handle.discarded and handle.closed and not handle.completed


def test_a_long_piece_is_read_in_parts(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "PART", 10)
    commit(bucket, 4)
    assert content(bucket, 4) == bytes(range(64))


# What a user may get wrong.


@pytest.mark.parametrize(
    ("to", "what", "fix"),
    [
        ("/mnt/checkpoints", "is no URL", "file:///"),
        ("s3://", "is no URL", "s3://bucket/runs"),
        ("://bucket", "is no URL", "s3://bucket/runs"),
        ("wurst://bucket/runs", "fsspec knows no wurst://", "s3://bucket/runs"),
        ("memory://bucket/*", "have other meanings", "plain URL"),
        ("memory://a b", "have other meanings", "plain URL"),
        ("simplecache::memory://bucket", "have other meanings", "plain URL"),
        ("https://example.com/x?signature=geheim", "have other meanings", "plain URL"),
        ("s3://name:geheim@bucket/runs", "holds a password", "environment"),
        ("s3://name:ge/heim@bucket/runs", "holds a password", "environment"),
        ("data://abc", "NotImplementedError", "credentials"),
    ],
)
def test_what_is_no_place_is_refused_without_its_secrets(
    to: str, what: str, fix: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(BadInput) as refused:
        run.keep_in(to)
        run.check_reachable()
    (problem,) = refused.value.problems
    assert problem.what.startswith("checkpoint.to: ") and what in problem.what
    assert fix in problem.fix
    assert "geheim" not in str(problem) and "heim@" not in str(problem)
    assert not run.path.exists()


def test_a_missing_package_is_named_before_anything_is_spawned(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(BadInput) as refused:
        train(checkpoint__to="gs://bucket/runs")
    (problem,) = refused.value.problems
    assert problem.what == "checkpoint.to: gs:// needs a package that is not installed"
    assert problem.fix == "pip install gcsfs"
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match="credentials that may list, write and delete"):
        ObjectStore(f"file://{tmp_path}/file/runs").check()
    fine = ObjectStore(f"file://{tmp_path}/runs")
    fine.check()
    assert objects(fine) == []


# Whole runs.


def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(training: MakeTraining, memory: str) -> None:
    first = training(checkpoint__to=memory, checkpoint__keep=3, recipe__steps=6)
    first.run_to_end(lambda: False)
    bucket = first.run.disk
    assert isinstance(bucket, ObjectStore) and bucket.url == f"{memory}/run"
    assert bucket.committed() == [2, 4, 6]
    assert not any(first.run.checkpoints.iterdir())
    change(bucket, "step-00000006/rank-00000-0.bin", lambda content: content[:-4] + b"oops")
    bucket.files.rm_file(f"{bucket.root}/step-00000004/rank-00000-0.bin")
    second = training(checkpoint__to=memory, checkpoint__keep=3, recipe__steps=6)
    assert second.done == 2
    assert bucket.committed() == [2]
    faults = [json.loads(line) for line in second.run.faults.read_text().splitlines()]
    assert [(fault["kind"], fault["step"]) for fault in faults] == [
        ("damaged checkpoint", 6),
        ("damaged checkpoint", 4),
    ]
    assert b"BLAKE3" in bucket.files.cat_file(f"{bucket.root}/step-00000006/reason.txt")
    second.run_to_end(lambda: False)
    assert bucket.committed() == [2, 4, 6]


def test_a_store_that_does_not_answer_costs_an_attempt_and_no_checkpoint(
    training: MakeTraining, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"checkpoint__to": memory, "recipe__steps": 4}
    training(**options).run_to_end(lambda: False)
    whole = MemoryFileSystem.cat_file

    def silent(self: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None) -> Any:
        if path.endswith(".bin"):
            raise RuntimeError("no answer")
        return whole(self, path, start, end)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "cat_file", silent)
        with pytest.raises(Unreachable):
            training(**options)
    assert training(**options).done == 4


def test_a_run_on_a_store_resumes_in_another_layout_to_the_same_bits(train: Train, tmp_path: Path) -> None:
    options = {"recipe__steps": 16, "run__strict": True, "checkpoint__every": 5}
    to = {"checkpoint__to": f"file://{tmp_path}/store/runs"}
    with after_steps(tmp_path / "run", 5, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        stopped = train("run", "dp=2", **options, **to)
    assert stopped.report.code == STOPPED, stopped.report.message
    assert 0 < stopped.report.step < 16
    assert not any(stopped.directory.checkpoints.iterdir())
    assert (tmp_path / "store/runs/run" / f"step-{stopped.report.step:08d}" / "manifest.json").is_file()
    # Looked for elsewhere, it would begin anew.
    with pytest.raises(BadInput, match="elsewhere: file://"):
        train("run", "dp=2", **options)
    continued = train("run", "fsdp=2", **options, **to)
    assert continued.report.code == FINISHED, continued.report.message
    assert continued.directory.disk.committed() == [15, 16]
    whole = train("whole", "dp=1", **options)
    assert continued.hexes == whole.hexes
    assert continued.tensors() == whole.tensors()


def test_a_rank_that_is_lost_between_commits_leaves_whole_checkpoints(train: Train, tmp_path: Path) -> None:
    options = {"recipe__steps": 16, "checkpoint__every": 1, "checkpoint__keep": 3}
    directory = RunDirectory(tmp_path / "run")

    def kill() -> None:
        snapshot = FlightReader(directory.flight(1)).look()
        assert snapshot is not None
        os.kill(snapshot.pid, signal.SIGKILL)

    with after_steps(directory.path, 6, kill):
        run = train("run", "dp=2", checkpoint__to=f"file://{tmp_path}/store", **options)
    assert run.report.code == FINISHED, run.report.message
    assert [json.loads(line)["kind"] for line in directory.faults.read_text().splitlines()].count(
        "restart"
    ) == 1
    bucket = run.directory.disk
    assert isinstance(bucket, ObjectStore) and bucket.committed() == [14, 15, 16]
    named = set()
    for step in bucket.committed():
        checkpoint = Checkpoint(bucket, step)
        checkpoint.verify()
        named |= {f"step-{step:08d}/{piece.file}" for piece in checkpoint.manifest.pieces}
    assert {path for path in objects(bucket) if path.endswith(".bin")} == named
    assert run.hexes == train("whole", "dp=2", **options).hexes


def test_a_run_is_found_without_its_directory_and_moved_aside_with_it(train: Train, tmp_path: Path) -> None:
    options = {"checkpoint__to": f"file://{tmp_path}/store", "recipe__steps": 4}
    train(**options)
    (tmp_path / "run").rename(tmp_path / "lost")
    found = train(**options)
    assert found.report.code == FINISHED and "already" in found.report.message
    with pytest.raises(BadInput, match="holds another run"):
        train(**options, recipe__lr=0.5)
    again = train(**options, recipe__lr=0.5, fresh=True)
    assert again.report.code == FINISHED and len(again.rows) == 4
    old = RunDirectory(tmp_path / "run.old-1")
    old.keep_in(options["checkpoint__to"])
    assert old.step() == 4 and again.directory.step() == 4
    Checkpoint(old.disk, 4).verify()
    train(**options, fresh=True)
    assert RunDirectory(tmp_path / "run.old-2").step() == 4
