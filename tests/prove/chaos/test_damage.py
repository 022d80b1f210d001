"""What a campaign damages: the newest copy, whatever else exists at that moment, and never the last sound one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import make_state

from shoal.prove.chaos.damage import damage
from shoal.prove.chaos.fault_kinds import KINDS
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.node_memory import forget
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.storage import CheckpointStorage, DirectoryStorage
from shoal.train.run_directory import RunDirectory

DAMAGES = [kind.name for kind in KINDS if kind.target == "checkpoint"]


@pytest.fixture(params=["directory", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.manifest.write_text(json.dumps({"id": tmp_path.name}))
    run.keep_in(f"file://{tmp_path}/store" if request.param == "bucket" else None)
    yield run
    forget(run.id)


def put(place: CheckpointStorage, *steps: int) -> None:
    for step in steps:
        state = make_state(small("tiny"), steps=step)
        saver = Saver("disk", place, state.new_stage(), state.mesh, "one-1")
        saver.start(state.manifest(step, step, {}), state.states())
        saver.close()
        assert step in place.committed()


def sound(place: CheckpointStorage) -> list[int]:
    """The steps of which every byte is what was written."""
    found = []
    for step in place.committed():
        try:
            Checkpoint(place, step).verify()
        except Damaged:
            continue
        found.append(step)
    return found


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_only_sound_copy_is_left_alone(run: RunDirectory, kind: str) -> None:
    """At step 1 the disk may have nothing yet, or nothing but what is still being written, or what is damaged."""
    memory = run.memory()
    put(memory, 1)
    assert damage(run, kind, random.Random(0)) is None
    if isinstance(run.disk, DirectoryStorage):
        run.disk.aside(1, "one-2").mkdir()
        shutil.copytree(memory.at(1), run.disk.aside(1, "one-2"), dirs_exist_ok=True)
        assert damage(run, kind, random.Random(0)) is None
        broken = run.disk.at(1)
        run.disk.aside(1, "one-2").rename(broken)
        (broken / "rank-00000.bin").write_bytes(b"")
        assert damage(run, kind, random.Random(0)) is None
        shutil.rmtree(broken)
    assert sound(memory) == memory.committed() == [1]
    # The same where it is on disk alone.
    shutil.rmtree(memory.path)
    put(run.disk, 1)
    assert damage(run, kind, random.Random(0)) is None
    assert sound(run.disk) == [1]


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_newest_is_struck_where_there_is_another(run: RunDirectory, kind: str) -> None:
    put(run.memory(), 2)
    put(run.disk, 1)
    assert damage(run, kind, random.Random(0)) == 1
    assert sound(run.memory()) == [] and sound(run.disk) == [1]
    # The disk's copy is newer, and what is in memory is left to continue from.
    shutil.rmtree(run.memory().path)
    put(run.memory(), 1)
    put(run.disk, 2)
    assert damage(run, kind, random.Random(0)) == 1
    assert sound(run.memory()) == [1] and sound(run.disk) == [1]


def test_what_is_gone_is_counted(run: RunDirectory) -> None:
    """Both have the newest: memory's is struck and the disk's is left; or memory is lost, and the disk's is struck."""
    seen: set[bool] = set()
    for seed in range(12):
        if len(seen) == 2:
            break
        put(run.memory(), 2, 3)
        put(run.disk, 1, 3)
        gone = damage(run, "flipped bit", random.Random(seed))
        lost_memory = not run.memory().path.exists()
        assert gone == (2 if lost_memory else 0)
        assert sound(run.disk) == ([1] if lost_memory else [1, 3])
        seen.add(lost_memory)
        shutil.rmtree(run.memory().path, ignore_errors=True)
        run.disk.remove(3)
    assert len(seen) == 2
