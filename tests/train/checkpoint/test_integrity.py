"""Nothing damaged, and nothing made to do harm, is ever read into a tensor."""

from __future__ import annotations

import ast
import itertools
import os
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.damages import Damages, done
from blake3 import blake3
from tests.ranks import run_ranks
from tests.train.checkpoint.rewrite import Content, rewrite
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import commit, make_state
from tests.train.checkpoint.test_layouts import _placed as placed

import shoal.train.checkpoint
from shoal.models.initial import Slice
from shoal.parallel.signed_store import SignedStore
from shoal.train.checkpoint.manifest import (
    LARGEST_MANIFEST,
    LONGEST_MESSAGE,
    NAME,
    Damaged,
    Manifest,
    StoredPiece,
    parse_manifest,
)
from shoal.train.checkpoint.read import Checkpoint, Wanted
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.storage import DirectoryStorage, step_of

DAMAGES = 150


def _save_two_steps(rank: int, world: int, path: Path) -> None:
    state = placed("fsdp=2", rank, "tiny", filled=True)
    saver = Saver("disk", DirectoryStorage(path), state.new_stage(), state.mesh, "test")
    saver.store = SignedStore(torch.distributed.distributed_c10d._get_default_store(), b"s" * 32)
    for step in (3, 4):
        for piece in state.pieces:
            piece.tensor.data.mul_(step)
        saver.start(state.manifest(step, step * 8, {}), state.states())
        saver.finish()
        assert [saved.error for saved in saver.take_results()] == [""]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two steps' checkpoints, each by two ranks: of the same shapes, and other values."""
    place = DirectoryStorage(tmp_path_factory.mktemp("pair"))
    run_ranks(2, _save_two_steps, place.path)
    return place.at(4), place.at(3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return commit(make_state(small("tiny")), tmp_path, 7, 56, {})


def test_no_damage_reaches_a_tensor(pair: tuple[Path, Path]) -> None:
    """Flips, truncations, swaps and losses of any file; ``benchmarks/integrity.py`` does a thousand."""
    path, other = pair
    sound = Checkpoint(path)
    keys = sorted({(piece.state, piece.tensor) for piece in sound.manifest.pieces})
    written = {key: sound.tensor(*key) for key in keys}
    damages = Damages(path, other, seed=11)
    for damage in damages.draw(DAMAGES):
        into = {key: torch.full_like(tensor, torch.nan) for key, tensor in written.items()}
        with done(damage, path, damages.content), pytest.raises(Damaged):
            read_all(path, into)
        for key, tensor in into.items():
            assert ((tensor == written[key]) | tensor.isnan()).all(), (damage.kind, damage.what, key)
    read_all(path, into)
    assert all(torch.equal(into[key], written[key]) for key in keys)


def read_all(path: Path, into: dict[tuple[str, str], torch.Tensor]) -> None:
    Checkpoint(path, threads=1).read(
        [Wanted(*key, (0,) * tensor.dim(), tensor) for key, tensor in into.items()]
    )


class Payload:
    """What pickle would run on loading it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_in_place_of_a_file_does_nothing(saved: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for file in ("rank-00000.bin", NAME):
        original = (saved / file).read_bytes()
        for content in (pickle.dumps(Payload(ran)), _torch_pickle(Payload(ran), tmp_path)):
            # Also one of the right length, which only a hash tells apart.
            for planted in (content, content.ljust(len(original), b"\0")[: len(original)]):
                (saved / file).write_bytes(planted)
                with pytest.raises(Damaged):
                    Checkpoint(saved).verify()
        (saved / file).write_bytes(original)
    (saved / ".metadata").write_bytes(pickle.dumps(Payload(ran)))
    Checkpoint(saved).verify()
    assert not ran.exists()
    pickle.loads(pickle.dumps(Payload(ran)))
    assert ran.exists(), "the payload does run, where somebody loads it"


def _torch_pickle(payload: Payload, folder: Path) -> bytes:
    torch.save(payload, folder / "payload.pt")
    return (folder / "payload.pt").read_bytes()


def test_checkpoints_know_no_pickle() -> None:
    (folder,) = shoal.train.checkpoint.__path__
    for file in Path(folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            )
            assert not {"pickle", "marshal", "dill", "cloudpickle"} & set(names), file
            if isinstance(node, ast.Attribute):
                assert not (node.attr in ("load", "save") and ast.unparse(node.value) == "torch"), file


# What a manifest may say, and be hashed correctly, that no writer of ours would say.


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def piece(**changes: Any) -> Callable[[Content], object]:
    return lambda content: content["pieces"][0].update(changes)


HARM: dict[str, Callable[[Content], object]] = {
    "a file above": piece(file="../step-00000007/rank-00000.bin"),
    "an absolute file": piece(file="/etc/passwd"),
    "a hidden file": piece(file=".rank-00000.bin"),
    "no file": piece(file=""),
    "the directory": piece(file="."),
    "a file with NUL": piece(file="rank-00000.bin\0.txt"),
    "a file with a line break": piece(file="rank-00000.bin\n"),
    "a full-width file": piece(file="rank-0000\uff10.bin"),
    "an accented file": piece(file="r\u00e4nk-00000.bin"),
    "a long file": piece(file="a" * 5000),
    "the manifest as a piece": piece(file=NAME),
    "a negative position": piece(position=-4),
    "a position beyond": piece(position=10**30),
    "bytes of an absurd number": piece(bytes=10**30),
    "negative bytes": piece(bytes=-4),
    "a box of no size": piece(size=[0, 32]),
    "a negative size": piece(size=[-61, -32]),
    "a negative offset": piece(offset=[-1, 0]),
    "a box outside": piece(offset=[10**20, 0]),
    "other dimensions": piece(offset=[0], size=[61 * 32]),
    "another dtype": piece(dtype="object"),
    "a dtype of another size": piece(dtype="float64"),
    "a tensor that is not there": piece(tensor="model.other.weight"),
    "a tensor's name that is a command": piece(tensor="\x1b[2J"),
    "a lone surrogate": piece(tensor="\ud800"),
    "a hash of nothing": piece(hash=""),
    "an unknown field": piece(code="import os"),
    "a piece twice": lambda content: content["pieces"].append(content["pieces"][0]),
    "a piece less": lambda content: content["pieces"].pop(),
    "no pieces": lambda content: content.update(pieces=[]),
    "no tensors": lambda content: content.update(pieces=[], shapes={}),
    "an absurd shape": lambda content: content["shapes"].update({"model.norm.weight": [1 << 60]}),
    "an absurd shape that has no pieces": lambda content: content["shapes"].update({"more": [1 << 60]}),
    "a tensor without its weight": lambda content: content["shapes"].update({"more": [4]}),
    "too many dimensions": lambda content: content["shapes"].update({"more": [1] * 1000}),
    "a negative shape": lambda content: content["shapes"].update({"model.norm.weight": [-32]}),
    "a name to move the cursor": lambda content: content["shapes"].update({"\x1b[31m": [4]}),
    "a step of text": lambda content: content.update(step="7"),
    "a step that is true": lambda content: content.update(step=True),
    "another step": lambda content: content.update(step=8),
    "a huge step": lambda content: content.update(step=10**4000),
    "a huge format": lambda content: content.update(format=10**100),
    "a format that is a float": lambda content: content.update(format=2.0),
    "no format": lambda content: content.pop("format"),
    "a scalar that is NaN": lambda content: content["scalars"].update(loss_scale=float("nan")),
    "a scalar that is infinite": lambda content: content["scalars"].update(updates=float("inf")),
    "a loss that is NaN": lambda content: content.update(heldout_loss=float("nan")),
    "samples below zero": lambda content: content.update(samples=-5),
    "more samples than a file can count": lambda content: content.update(samples=10**40),
    "an optimizer state of one tensor missing": lambda content: content.update(
        pieces=[
            one
            for one in content["pieces"]
            if (one["state"], one["tensor"]) != ("exp_avg", "model.norm.weight")
        ]
    ),
    "a deep model": lambda content: content["model"].update(deep=deep(400)),
    "a deep identity": lambda content: content["identity"].update(deep=deep(900)),
    "a model that is a list": lambda content: content.update(model=[]),
    "shapes that are text": lambda content: content.update(shapes="all"),
}


@pytest.mark.parametrize("kind", HARM)
def test_a_manifest_made_to_do_harm_is_refused(kind: str, saved: Path) -> None:
    rewrite(saved, lambda content: None)
    Checkpoint(saved).verify()
    rewrite(saved, HARM[kind])
    with pytest.raises(Damaged) as refusal:
        Checkpoint(saved).verify()
    assert str(refusal.value).isprintable() and len(str(refusal.value)) <= LONGEST_MESSAGE


@pytest.mark.parametrize("shape", [(1, 4000), (4000, 1)])
def test_thousands_of_pieces_are_not_compared_in_pairs(shape: tuple[int, ...], tmp_path: Path) -> None:
    """4,000 of one element took 90 seconds once, before a byte of them was read."""
    cells = list(itertools.product(*map(range, shape)))
    values = torch.arange(float(len(cells)))
    content = values.numpy().tobytes()
    pieces = [
        StoredPiece(
            tensor="w",
            state="weight",
            dtype="float32",
            offset=cell,
            size=(1,) * len(shape),
            file="rank-00000.bin",
            position=4 * number,
            bytes=4,
            hash=blake3(content[4 * number : 4 * number + 4]).hexdigest(),
        )
        for number, cell in enumerate(cells)
    ]
    fields: dict[str, Any] = {
        **{"step": 1, "samples": 8, "model": {}, "identity": {}, "recipe": "", "scalars": {}},
        "shapes": {"w": shape},
    }
    place = DirectoryStorage(tmp_path)
    place.write(1, "test", "rank-00000.bin", [memoryview(content)])
    place.commit(1, "test", Manifest(**fields, pieces=tuple(pieces)).to_text())
    began = time.process_time()
    checkpoint = Checkpoint(place, 1, threads=1)
    rows = [torch.empty(1, *shape[1:]) for _ in range(shape[0])]
    corner = (0,) * (len(shape) - 1)
    checkpoint.read([Wanted("weight", "w", (number, *corner), row) for number, row in enumerate(rows)])
    assert torch.equal(torch.cat(rows), values.view(shape))
    # One cell twice and another not at all: as many elements as there should be, and no gap in the file.
    twice = [*pieces[:-1], pieces[-1].model_copy(update={"offset": pieces[7].offset})]
    with pytest.raises(Damaged, match="do not make up the tensor"):
        parse_manifest(Manifest(**fields, pieces=tuple(twice)).to_text().encode(), "twice")
    assert time.process_time() - began < 20


def test_text_that_only_means_the_same_is_refused(saved: Path) -> None:
    """Every byte of a manifest counts, so there is one way to write it."""
    text = (saved / NAME).read_text()
    once = re.search(r'"samples":56,', text)
    assert once
    variants = {
        "a key twice": text.replace(once[0], once[0] * 2),
        "a key twice, the harmless one last": text.replace(once[0], '"samples":57,' + once[0]),
        "a blank more": text.replace(":56,", ": 56,"),
        "another line": text + "\n",
        "no last line break": text.rstrip("\n"),
        "a float": text.replace(":56,", ":56.0,"),
        "an escape": text.replace('"weight"', '"\\u0077eight"', 1),
        "a mark of byte order": "\ufeff" + text,
        "deeper than any parser": "[" * 200_000,
        "digits without end": '{"format":' + "9" * 100_000 + "}",
        "not JSON": "Infinity",
        "nothing": "",
    }
    encoded = {kind: variant.encode() for kind, variant in variants.items()}
    encoded["two bytes a letter"] = text.encode("utf-16")
    encoded["not text"] = b"\xff\xfe\x00\xd8"
    for kind, content in encoded.items():
        with pytest.raises(Damaged):
            parse_manifest(content, kind)
    parse_manifest(text.encode(), "unchanged")


def test_only_files_of_its_own_are_read(saved: Path, tmp_path: Path) -> None:
    """Not through a link, even to the very content; not from a pipe, which would never answer; not a directory."""
    for file in ("rank-00000.bin", NAME):
        kept = (saved / file).rename(tmp_path / "kept")
        (saved / file).symlink_to(kept)
        refused(saved)
        (saved / file).unlink()
        os.mkfifo(saved / file)
        refused(saved)
        (saved / file).unlink()
        (saved / file).mkdir()
        refused(saved)
        (saved / file).rmdir()
        kept.rename(saved / file)
    Checkpoint(saved).verify()


def refused(saved: Path) -> None:
    with pytest.raises(Damaged, match="no file of its own"):
        Checkpoint(saved).verify()


def test_a_manifest_longer_than_memory_is_not_read(saved: Path) -> None:
    os.truncate(saved / NAME, LARGEST_MANIFEST << 12)
    with pytest.raises(Damaged, match="too long"):
        Checkpoint(saved)


def test_what_is_wanted_must_be_there(saved: Path) -> None:
    """A model of another shape gets nothing, rather than a part of what it wants."""
    checkpoint = Checkpoint(saved)
    for shape, offset in (((62, 32), (0, 0)), ((61, 32), (1, 0)), ((61,), (0,))):
        with pytest.raises(Damaged, match="has the shape"):
            checkpoint.read([Wanted("weight", "model.embed_tokens.weight", offset, torch.empty(shape))])
    wider = small("tiny").model_copy(update={"vocab": 62})
    table = Slice(torch.empty(62, 32), (62, 32), (0, 0))
    with pytest.raises(Damaged, match="in this model it is"):
        checkpoint.fill(wider, [("weight", "embed_tokens.weight", table)])
    with pytest.raises(Damaged, match="holds no"):
        checkpoint.tensor("momentum_buffer", "model.embed_tokens.weight")


def test_a_checkpoint_is_known_by_its_name(saved: Path) -> None:
    """Of a directory called otherwise, that of another step would be read."""
    assert [step_of(name) for name in ("step-00000007", "step-123456789")] == [7, 123456789]
    for name in ("step-7", "step-000000007", "step-0000000७", "damaged-step-00000007", "step-" + "9" * 5000):
        assert step_of(name) is None
    aside = saved.rename(saved.with_name("damaged-step-00000007"))
    with pytest.raises(Damaged, match="not named"):
        Checkpoint(aside)
    with pytest.raises(Damaged, match="is the checkpoint of step 7"):
        Checkpoint(aside.rename(saved.with_name("step-00000008")))
