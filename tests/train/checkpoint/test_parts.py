"""A manifest in parts: each rank lists its own pieces, and a reader opens the lists that it needs, and no others."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.train.checkpoint import test_layouts
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import commit, make_state

from shoal.cli.main import main
from shoal.facts.model.tensor_split import meet
from shoal.train.checkpoint import parts
from shoal.train.checkpoint.manifest import IN_PARTS, Damaged, parse_manifest
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.storage import DirectoryStorage, manifest_of


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose only rank lists its pieces itself."""
    monkeypatch.setattr(parts, "MOST_LISTED", 0)
    return commit(make_state(small("tiny")), tmp_path / "run" / "checkpoints", 7, 56, {})


def test_a_list_and_a_complete_manifest_say_the_same(saved: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [
        "manifest.json",
        "rank-00000.bin",
        "rank-00000.json",
    ]
    manifest = manifest_of(DirectoryStorage(saved.parent), 7)
    assert manifest.format == IN_PARTS and not manifest.pieces
    parts.MOST_LISTED = 50_000
    whole = commit(make_state(small("tiny")), tmp_path / "whole", 7, 56, {})
    listed, complete = Checkpoint(saved), Checkpoint(whole)
    assert listed.all_pieces() == complete.manifest.pieces and listed.states == complete.states
    assert listed.manifest.count == len(complete.manifest.pieces)
    assert listed.manifest.bytes == complete.manifest.bytes
    for state, name in {(piece.state, piece.tensor) for piece in complete.manifest.pieces}:
        assert torch.equal(listed.tensor(state, name), complete.tensor(state, name))
    assert listed.parts_opened == 1
    # One that lists everything is what it was before there were parts, to the byte.
    assert json.loads((whole / "manifest.json").read_text()).keys().isdisjoint({"parts", "index", "states"})
    # A resume finds what it needs.
    state = make_state(small("tiny"), seed=1)
    assert state.restore(Checkpoint(saved)) == 7


def test_a_changed_list_is_found(saved: Path) -> None:
    Checkpoint(saved).verify()
    listed = saved / "rank-00000.json"
    sound = listed.read_bytes()
    rows = json.loads(sound)
    rows["pieces"][0]["offset"] = [1] * len(rows["pieces"][0]["offset"])
    for changed in (sound[:-1], b"{" + sound[1:-2] + b" \n", json.dumps(rows).encode().ljust(len(sound))):
        listed.write_bytes(changed)
        with pytest.raises(Damaged, match=r"rank-00000\.json"):
            Checkpoint(saved).tensor("weight", "model.norm.weight")
        with pytest.raises(SystemExit, match="1"):
            main(["checkpoint", "verify", str(saved)])
    listed.unlink()
    with pytest.raises(Damaged, match="missing"):
        Checkpoint(saved)
    with pytest.raises(SystemExit, match="0"):
        main(["checkpoint", "ls", str(saved)])
    listed.write_bytes(sound)
    Checkpoint(saved).verify()


def test_an_index_that_leaves_out_a_tensor_is_found(saved: Path) -> None:
    """By a rank that looks for it there, and by who verifies everything. The hashes are all right."""
    manifest = manifest_of(DirectoryStorage(saved.parent), 7)
    index = {kind: dict(tensors) for kind, tensors in manifest.index.items()}
    del index[""]["model.norm.weight"]
    (saved / "manifest.json").write_text(manifest.model_copy(update={"index": index}).to_text())
    with pytest.raises(Damaged, match=r"no weight of model\.norm\.weight"):
        Checkpoint(saved).tensor("weight", "model.norm.weight")
    with pytest.raises(Damaged, match="its index is not that of its parts"):
        Checkpoint(saved).verify()
    runs = {"": {"model.norm.weight": ((0, 1, 9, (0,), (1,), (1,)),)}}
    text = manifest.model_copy(update={"index": runs}).to_text()
    with pytest.raises(Damaged, match="names parts that do not exist"):
        parse_manifest(text.encode(), "manifest")


def _save(rank: int, world: int, layout: str, path: Path) -> None:
    parts.MOST_LISTED = 0
    test_layouts._save(rank, world, layout, "tiny", path)


def _load(rank: int, world: int, layout: str, path: Path) -> int:
    test_layouts._load(rank, world, layout, "tiny", path)
    checkpoint = Checkpoint(DirectoryStorage(path), 3, share=(rank, world))
    checkpoint.open_for([])
    return checkpoint.parts_opened


def test_any_layout_reads_the_lists_of_any_other(tmp_path: Path) -> None:
    run_ranks(4, _save, "tp=2,fsdp=2", tmp_path)
    manifest = manifest_of(DirectoryStorage(tmp_path), 3)
    assert [part.of for part in manifest.parts] == [f"rank-{rank:05d}.bin" for rank in range(4)]
    Checkpoint(DirectoryStorage(tmp_path), 3).verify()
    assert run_ranks(2, _load, "pp=2", tmp_path) == [0, 0]


def _boxes(generator: random.Random, count: int) -> list[parts.Coverage]:
    """Rows and columns shared out evenly among most; and some boxes at random."""
    rows, columns = generator.choice([1, 2, 4]), generator.choice([1, 2, 4])
    found = []
    for number in range(count):
        row, column = number // columns % rows, number % columns
        box = ((row * 8, column * 4), (8, 4))
        if generator.random() < 0.3:
            box = (
                (generator.randrange(30), generator.randrange(12)),
                (generator.randint(1, 9), generator.randint(1, 5)),
            )
        found.append({"": {"w": box}} if generator.random() < 0.9 else {})
    return found


def test_the_index_finds_every_part_that_has_an_element() -> None:
    generator = random.Random(0)
    for _ in range(200):
        coverages = _boxes(generator, generator.randint(1, 20))
        manifest = make_state_manifest().model_copy(update={"index": parts.index_of(coverages)})
        wanted = (
            (generator.randrange(30), generator.randrange(12)),
            (generator.randint(1, 12), generator.randint(1, 6)),
        )
        near = {
            number for number, one in enumerate(coverages) if one and meet(*one[""]["w"], *wanted) is not None
        }
        assert parts.parts_near(manifest, "weight", "w", wanted) == near


def test_evenly_spaced_parts_are_one_entry() -> None:
    every = [{"": {"w": ((rank // 8 * 16, rank % 8 * 64), (16, 64))}} for rank in range(1024)]
    runs = parts.index_of(every)[""]["w"]
    assert len(runs) == 8 and runs[0] == (0, 8, 128, (0, 0), (16, 0), (16, 64))


def make_state_manifest() -> parts.Manifest:
    return make_state(small("tiny"), steps=0).manifest(1, 8, {})


def test_of_many_ranks_each_removes_its_own_files(tmp_path: Path) -> None:
    place = DirectoryStorage(tmp_path, durable=False)
    place.share_removal(65)
    for step in (1, 2):
        for rank in range(3):
            place.write(step, "a", f"rank-{rank:05d}.bin", [memoryview(b"x")])
        place.commit(step, "a", "{}")
    place.remove(1)
    assert place.committed() == [2]
    (doomed,) = tmp_path.glob(".unfinished-removed-*")
    place.remove_share(["rank-00001.bin", "rank-00001.json"])
    assert {path.name for path in doomed.iterdir()} == {"manifest.json", "rank-00000.bin", "rank-00002.bin"}
    place.remove_rest()  # others may not have looked yet
    assert doomed.exists()
    place.remove_rest()
    assert not doomed.exists() and place.committed() == [2]
    # What an attempt left is out of the way at once, and removed in the same way.
    place.write(3, "dead", "rank-00000.bin", [memoryview(b"x")])
    place.clear()
    assert [path.name for path in tmp_path.glob(".unfinished-*")] == [
        ".unfinished-removed-step-00000003-dead"
    ]
