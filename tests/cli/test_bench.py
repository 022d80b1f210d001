"""``shoal bench plan``: a table for people, one JSON document for scripts, exit 2 for a table that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import main

COLUMNS = "id,source,arch,layers,hidden,heads,ffn,vocab,seq,gpu,gpus,micro_batch,global_batch,step_s,status"
ROWS = """\
fast,here: a test,llama,16,2048,32,8192,32000,2048,H100,1,4,16,1.5,ok
none,here: a test,llama,16,2048,32,8192,32000,2048,H100,1,,16,,oom
"""

Capture = pytest.CaptureFixture[str]


def bench(capsys: Capture, *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "plan", *arguments])
    return ended.value.code, *capsys.readouterr()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(f"{COLUMNS}\n{ROWS}")
    return path


def test_json(runs: Path, capsys: Capture) -> None:
    code, out, _ = bench(capsys, "--runs", str(runs), "--json")
    document = json.loads(out)
    assert code == 0
    first, second = document["rows"]
    assert first["error"] == pytest.approx(first["predicted_step_s"] / 1.5 - 1)
    assert second["error"] is None and second["measured_step_s"] is None and second["status"] == "oom"
    assert document["sources"]["here"]["n"] == 1


def test_for_people(runs: Path, capsys: Capture) -> None:
    code, out, _ = bench(capsys, "--runs", str(runs))
    assert code == 0
    assert "mean error" in out and "here" in out and "furthest off, of 2:" in out


@pytest.mark.parametrize("text", ["", "id,source\n1,2\n"])
def test_a_table_that_cannot_be_read(text: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    code, out, err = bench(capsys, "--runs", str(path), "--json")
    assert code == 2 and out == ""
    assert err.startswith("error: ") and "  fix: " in err


def test_no_table_at_all(capsys: Capture) -> None:
    code, _, err = bench(capsys)
    assert code == 2 and "--runs" in err
