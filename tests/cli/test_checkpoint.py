"""``shoal checkpoint ls`` and ``verify``: what there is, and whether it is what was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.train.checkpoint.rewrite import rewrite
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import commit, make_state

from shoal.cli.main import main
from shoal.train.checkpoint.node_memory import forget
from shoal.train.run_directory import RunDirectory

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Three checkpoints on disk, of which the first was set aside, and a later one in memory."""
    run = RunDirectory(tmp_path / "runs" / "small")
    run.checkpoints.mkdir(parents=True)
    run.config.touch()
    run.manifest.write_text(json.dumps({"id": f"test-{tmp_path.name}-{id(run)}"}))
    state = make_state(small("tiny"))
    for step in (2, 4, 6):
        commit(state, run.checkpoints, step, step * 8, {}, heldout_loss=2.5 if step == 6 else None)
    run.disk.set_aside(2, "a bit was flipped")
    commit(state, run.memory().path, 7, 56, {})
    yield run
    forget(run.id)


def shoal(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def listed(path: Path, capsys: Output) -> dict[tuple[int, str], dict[str, Any]]:
    assert shoal("ls", path, "--json") == 0
    return {(one["step"], one["where"]): one for one in json.loads(capsys.readouterr().out)["checkpoints"]}


def flip(path: Path, position: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_everything_is_listed(run: RunDirectory, capsys: Output) -> None:
    found = listed(run.path, capsys)
    assert list(found) == [(2, "set aside"), (4, "disk"), (6, "disk"), (7, "memory")]
    six = found[6, "disk"]
    files = [path for path in (run.checkpoints / "step-00000006").iterdir() if path.suffix == ".bin"]
    assert six["bytes"] == sum(path.stat().st_size for path in files) and six["files"] == len(files)
    assert (six["samples"], six["heldout_loss"]) == (48, 2.5)
    assert six["pieces"] >= six["tensors"] * 3 and six["written"].startswith("20")
    assert found[2, "set aside"]["damage"] == "a bit was flipped"
    assert [one["step"] for one in found.values() if one["continued"]] == [7]
    # The directory of checkpoints says the same.
    assert listed(run.checkpoints, capsys) == found


def test_a_table_for_people(run: RunDirectory, capsys: Output) -> None:
    assert shoal("ls", run.path) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "step",
        "samples",
        "size",
        "tensors",
        "pieces",
        "files",
        "validation",
        "loss",
        "written",
        "where",
    ]
    assert [row.split()[0] for row in rows[:4]] == ["2", "4", "6", "7"]
    assert "resumes here" in rows[3] and "2.5000" in rows[2]
    assert rows[4].endswith("damaged-step-00000002: a bit was flipped")


def test_what_a_run_continues_from_has_no_known_damage(run: RunDirectory, capsys: Output) -> None:
    """As training decides: the newest whose manifest and lengths are right; of one step, the copy in memory."""
    forget(run.id)
    (run.checkpoints / "step-00000006" / "rank-00000.bin").write_bytes(b"short")
    found = listed(run.path, capsys)
    assert [one["step"] for one in found.values() if one["continued"]] == [4]
    assert "5 bytes" in found[6, "disk"]["damage"]


def test_sound_checkpoints_are_verified(run: RunDirectory, capsys: Output) -> None:
    assert shoal("verify", run.path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sound"] and [one["step"] for one in document["checkpoints"]] == [4, 6, 7]
    assert document["bytes"] == sum(one["bytes"] for one in document["checkpoints"]) > 0
    assert document["gb_per_s"] == pytest.approx(document["bytes"] / document["seconds"] / 1e9)
    assert shoal("verify", run.path) == 0
    assert "3 sound" in capsys.readouterr().out


def test_damage_is_named_to_the_piece(run: RunDirectory, capsys: Output) -> None:
    flip(run.checkpoints / "step-00000004" / "rank-00000.bin")
    assert shoal("verify", run.path) == 1
    printed = capsys.readouterr().out
    assert "1 of 3 damaged" in printed
    named = next(line for line in printed.splitlines() if "BLAKE3 differs" in line)
    assert (
        "step-00000004/rank-00000.bin: weight of model.embed_tokens.weight" in named and "bytes 0 to" in named
    )
    assert shoal("verify", run.checkpoints / "step-00000004", "--json") == 1
    (one,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert not one["sound"] and len(one["damages"]) == 1
    assert shoal("verify", run.checkpoints / "step-00000006") == 0


MODEL_CHANGES: dict[str, Any] = {
    "layers": 3,
    "hidden": 64,
    "vocab": 1 << 40,
    "heads": True,
    "family": "qwen2",
    "norm_eps": float("inf"),
    "rope_theta": 500.0,
    "window": 7,
}


@pytest.mark.parametrize("name", MODEL_CHANGES)
def test_a_model_that_was_changed_is_damage(name: str, run: RunDirectory, capsys: Output) -> None:
    """Also where the manifest was hashed again after the change."""
    rows = json.loads(run.manifest.read_text())
    run.manifest.write_text(json.dumps({**rows, "model": small("tiny").model_dump(mode="json")}))
    checkpoint = run.checkpoints / "step-00000006"
    assert shoal("verify", run.path) == 0
    rewrite(checkpoint, lambda content: content["model"].update({name: MODEL_CHANGES[name]}))
    capsys.readouterr()
    for path in (run.path, checkpoint):
        assert shoal("verify", path) == 1
        assert "model" in capsys.readouterr().out
    assert listed(run.path, capsys)[6, "disk"]["damage"]


def test_samples_that_do_not_fit_the_steps_are_damage(run: RunDirectory, capsys: Output) -> None:
    identity = {"recipe.batch": 8}
    for step, samples in ((8, 64), (9, 64)):
        commit(make_state(small("tiny")), run.checkpoints, step, samples, identity)
    assert shoal("verify", run.checkpoints / "step-00000008") == 0
    assert shoal("verify", run.checkpoints / "step-00000009") == 1
    assert "9 steps of 8 are 72" in capsys.readouterr().out
    for name, value in {"samples": -5, "recipe": "0" * 64, "scalars": {"updates": 2.0}}.items():
        saved = commit(make_state(small("tiny")), run.checkpoints, 10, 80, identity)
        rewrite(saved, lambda content, change={name: value}: content.update(change))
        assert shoal("verify", saved) == 1, name
        printed = capsys.readouterr().out
        assert "step-00000010" in printed and "Traceback" not in printed


def test_every_damage_is_told(run: RunDirectory, capsys: Output) -> None:
    file = run.checkpoints / "step-00000004" / "rank-00000.bin"
    flip(file)
    flip(file, file.stat().st_size - 1)
    assert shoal("verify", run.checkpoints / "step-00000004", "--json") == 1
    (one,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert len(one["damages"]) == 2


def test_a_damaged_manifest_is_damage(run: RunDirectory, capsys: Output) -> None:
    flip(run.checkpoints / "step-00000006" / "manifest.json")
    assert shoal("verify", run.path) == 1
    assert "step-00000006/manifest.json" in capsys.readouterr().out
    found = listed(run.path, capsys)
    assert found[6, "disk"]["damage"] and "bytes" not in found[6, "disk"]


def test_one_that_was_set_aside_is_verified_when_it_is_named(run: RunDirectory, capsys: Output) -> None:
    aside = run.checkpoints / "damaged-step-00000002"
    assert shoal("verify", aside) == 0
    flip(aside / "rank-00000.bin")
    assert shoal("verify", aside) == 1
    assert "BLAKE3 differs" in capsys.readouterr().out


def test_checkpoints_that_were_copied_need_no_run(run: RunDirectory, tmp_path: Path, capsys: Output) -> None:
    shutil.copytree(run.checkpoints, tmp_path / "copied")
    assert list(listed(tmp_path / "copied", capsys)) == [(2, "set aside"), (4, "disk"), (6, "disk")]
    assert shoal("verify", tmp_path / "copied" / "step-00000004") == 0


def test_a_run_without_checkpoints(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.toml").touch()
    assert shoal("ls", tmp_path) == 0 and shoal("verify", tmp_path) == 0
    assert "no checkpoint" in capsys.readouterr().out


def test_bad_input(run: RunDirectory, tmp_path: Path, capsys: Output) -> None:
    for command in ("ls", "verify"):
        for path in (tmp_path, tmp_path / "nowhere", run.config, run.checkpoints / "step-00000099"):
            assert shoal(command, path) == 2
            complaint = capsys.readouterr().err
            assert str(path) in complaint and complaint.count("error:") == complaint.count("fix:") == 1
    assert shoal("ls", run.path.with_name("smal")) == 2
    assert f"did you mean {run.path}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_help_has_an_example(command: str, capsys: Output) -> None:
    assert shoal(command, "--help") == 0
    assert f"Example: shoal checkpoint {command} " in capsys.readouterr().out
