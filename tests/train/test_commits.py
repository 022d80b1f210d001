"""What a run continues from, what it keeps, and what it does where a commit is damaged or cannot be made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.launch.progress import _fault
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.node_memory import forget
from shoal.train.checkpoint.retention import doomed
from shoal.train.checkpoint.staging import PinnedMemory, StagingBuffer
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.state import State

MakeTraining = Callable[..., Training]


def faults(training: Training) -> list[dict]:
    return [json.loads(line) for line in training.run.faults.read_text().splitlines()]


def run(training: Training) -> Training:
    training.run_to_end(bool)
    return training


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(training: MakeTraining) -> None:
    whole = run(training(checkpoint__every=2))
    directory = whole.run.checkpoints
    flip(directory / "step-00000006" / "rank-00000.bin")
    again = training(checkpoint__every=2)
    assert again.done == 4
    (row,) = faults(again)
    assert (row["kind"], row["step"]) == ("damaged checkpoint", 6) and "BLAKE3 differs" in row["message"]
    assert row["action"] == "set aside, trying step 4 on disk"
    assert "BLAKE3 differs" in (directory / "damaged-step-00000006" / "reason.txt").read_text()
    assert [entry["step"] for entry in read_rows(again.run.metrics)] == [1, 2, 3, 4]
    # Done again, the last step is what it was.
    run(again)
    for piece, other in zip(whole.state.pieces, again.state.pieces, strict=True):
        assert piece.tensor.equal(other.tensor)


def test_where_every_checkpoint_is_damaged_the_run_does_not_begin_anew(training: MakeTraining) -> None:
    made = run(training(checkpoint__every=3))
    for step in (3, 6):
        (made.run.checkpoints / f"step-{step:08d}" / "manifest.json").write_text("{}")
    with pytest.raises(Damaged, match="no sound checkpoint is left"):
        training(checkpoint__every=3)
    assert not made.run.disk.committed()
    assert len(list(made.run.checkpoints.glob("damaged-*"))) == 2
    # Nothing is said to be used where nothing is left.
    actions = [row["action"] for row in faults(made)]
    assert actions == ["set aside, trying step 3 on disk", "set aside, there is no other"]


def test_a_copy_in_memory_is_newer_than_the_last_commit(training: MakeTraining) -> None:
    """As after a launcher that was killed in step 6: four steps on disk, five in memory."""
    options = {"checkpoint__every": 4, "checkpoint__memory": 1}
    made = run(training(**options))
    try:
        made.run.disk.remove(6)
        made.run.memory().remove(6)
        assert made.run.disk.committed() == [4] and made.run.memory().committed() == [5]
        continued = training(**options)
        assert continued.done == 5
        # A damaged copy is dropped, and the disk's is used.
        flip(made.run.memory().at(5) / "rank-00000.bin")
        fallen_back = training(**options)
        assert fallen_back.done == 4
        assert faults(fallen_back)[-1]["action"] == "removed from memory, trying step 4 on disk"
    finally:
        forget(made.run.id)


def test_another_run_in_the_same_place_does_not_find_this_ones_memory(training: MakeTraining) -> None:
    made = run(training(checkpoint__every=0, checkpoint__memory=1))
    try:
        assert made.run.memory().committed() == [5, 6]
        shutil.rmtree(made.run.path)
        assert training(checkpoint__every=0, checkpoint__memory=1).done == 0
    finally:
        forget(made.run.id)


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"checkpoint__every": 0}, [False]),
        ({"checkpoint__every": 2}, [True]),
        ({"checkpoint__every": 0, "checkpoint__memory": 2}, [False, True]),
    ],
)
def test_a_run_without_commits_asks_for_no_room_ahead(
    training: MakeTraining, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], ahead: list[bool]
) -> None:
    """12 bytes a parameter of locked host memory, for nothing."""
    asked, new_stage = [], State.new_stage

    def noted(state: State, ahead: bool = True, **others: Any) -> StagingBuffer:
        asked.append(ahead)
        return new_stage(state, ahead, **others)

    monkeypatch.setattr(State, "new_stage", noted)
    made = training(**options)
    assert asked == ahead
    # Asked to stop it commits all the same.
    try:
        made.run_to_end(lambda: made.done == 1)
        assert made.run.disk.committed() == [1]
    finally:
        forget(made.run.id)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
def test_memory_that_cannot_be_pinned_is_told_of_once_and_commits_are_made(training: MakeTraining) -> None:
    made = training(checkpoint__every=2, checkpoint__memory=1)
    for saver in made.commits._savers.values():
        saver.stage._room = PinnedMemory(1)  # as on a GPU
    try:
        run(made)
        assert made.run.disk.committed()[-1] == 6
        (row,) = faults(made)
        assert (row["kind"], row["step"]) == ("staging", 1) and "could not be pinned" in row["action"]
        assert "step      1  staging: " in _fault(row)
    finally:
        forget(made.run.id)


def test_what_is_kept() -> None:
    steps = list(range(10, 110, 10))
    assert doomed(steps, {}, keep=2, every=0, best=0) == steps[:-2]
    assert doomed(steps, {}, keep=1, every=40, best=0) == [10, 20, 30, 50, 60, 70, 90]
    losses = {step: abs(step - 45) / 10 for step in steps}
    assert doomed(steps, losses, keep=1, every=0, best=2) == [10, 20, 30, 60, 70, 80, 90]
    assert doomed(steps, {30: 1.0}, keep=1, every=0, best=2) == [10, 20, 40, 50, 60, 70, 80, 90]
    assert doomed([], {}, keep=2, every=10, best=1) == []


def test_the_best_by_evaluation_is_kept(training: MakeTraining) -> None:
    made = training(
        recipe__steps=12, recipe__lr=3.0, checkpoint__every=2, checkpoint__keep=1, checkpoint__keep_best=1,
        checkpoint__keep_every=8, evaluate__every=2,
    )  # fmt: skip
    run(made)
    losses = {
        row["step"]: row["heldout_loss"] for row in read_rows(made.run.metrics) if "heldout_loss" in row
    }
    best = min(losses, key=lambda step: losses[step])
    assert made.run.disk.committed() == sorted({best, 8, 12})
    assert best not in (8, 12), "the case is not the one meant"
