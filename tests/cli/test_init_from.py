"""``shoal init --from``: a foreign file becomes a config that loads, or nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.command import Capture, shoal_

SETTINGS = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "wall_clock_breakdown": True,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_deepspeed_file(capsys: Capture) -> None:
    Path("ds.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    code, out, err = shoal_(capsys, "init", "run.toml", "--from", "ds.json")
    assert code == 0
    assert out == "wrote run.toml; edit it, then: shoal train run.toml\n"
    assert "note: wall_clock_breakdown = True: no counterpart, left out" in err.splitlines()
    assert "# - wall_clock_breakdown = True: no counterpart, left out\n" in Path("run.toml").read_text(
        "utf-8"
    )
    _, out, _ = shoal_(capsys, "config", "show", "run.toml", "--json")
    shown = json.loads(out)
    assert shown["layout"]["value"] == "fsdp=8,zero=2,micro=2"
    assert shown["recipe.precision"]["value"] == "bf16"
    assert shown["model.preset"]["origin"] == "default"


def test_an_accelerate_file_on_a_cluster(capsys: Capture) -> None:
    Path("a.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\n", encoding="utf-8")
    assert shoal_(capsys, "init", "--from", "a.yaml", "--on", "16xH100")[0] == 0
    _, out, _ = shoal_(capsys, "config", "show", "shoal.toml", "--json")
    shown = json.loads(out)
    assert (shown["layout"]["value"], shown["cluster.on"]["value"]) == ("fsdp=16", "16xH100")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "missing.json"], "there is no file missing.json"),
        (["--from", "broken.json"], "broken.json is not valid JSON"),
        (["--from", "unknown.json"], "is not a config of any stack"),
        (["--from", "ds.json", "--gpus", "3"], "64 does not divide by 3 data ranks"),
        (["--from", "ds.json", "--on", "8xH1000000"], "not in the catalogue"),
        (["--gpus", "8"], "--gpus goes with --from"),
    ],
)
def test_bad_input_writes_nothing(capsys: Capture, arguments: list[str], said: str) -> None:
    Path("broken.json").write_text("{", encoding="utf-8")
    Path("unknown.json").write_text("{}", encoding="utf-8")
    Path("ds.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    code, out, err = shoal_(capsys, "init", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "  fix: " in err
    assert not Path("shoal.toml").exists()


def test_a_file_that_is_there_stays(capsys: Capture) -> None:
    Path("ds.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    Path("shoal.toml").write_text("mine", encoding="utf-8")
    assert shoal_(capsys, "init", "--from", "ds.json")[0] == 2
    assert Path("shoal.toml").read_text("utf-8") == "mine"
    assert shoal_(capsys, "init", "--from", "ds.json", "--force")[0] == 0
