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
    assert "mean error" in out and "here" in out and "largest errors of 2:" in out


@pytest.mark.parametrize("text", ["", "id,source\n1,2\n"])
def test_a_table_that_cannot_be_read(text: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    code, out, err = bench(capsys, "--runs", str(path), "--json")
    assert code == 2 and json.loads(out)["ok"] is False
    assert err.startswith("error: ") and "  fix: " in err


HOSTILE = {
    "layers": ["1000000000", "-1", "0", "1e9", "nan", "9" * 5000],
    "hidden": ["0", "-4", "99999999999999999999", "7"],
    "heads": ["0", "-1", "1000000000000"],
    "vocab": ["0", "1000000000000000"],
    "seq": ["0", "-1", "", "99999999999999999999"],
    "gpus": ["0", "-8", "99999999999"],
    "gpu": ["", "H1000000", "x" * 1000],
    "micro_batch": ["-1", "0.5", "99999999999"],
    "global_batch": ["-1", "99999999999"],
    "step_s": ["nan", "-1", "inf", "0", "text"],
    "id": ["x" * 200_000],
}


@pytest.mark.parametrize("column", HOSTILE)
def test_numbers_that_no_run_has(column: str, tmp_path: Path, capsys: Capture) -> None:
    columns = COLUMNS.split(",")
    path = tmp_path / "runs.csv"
    for value in HOSTILE[column]:
        cells = ROWS.splitlines()[0].split(",")
        cells[columns.index(column)] = value
        path.write_text(f"{COLUMNS}\n{','.join(cells)}\n")
        code, out, err = bench(capsys, "--runs", str(path), "--json")
        assert code == 2 and json.loads(out)["problems"] and "Traceback" not in err, (column, value[:20])
        assert err.startswith("error: ") and len(err) < 20_000


def test_rows_of_another_length(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "runs.csv"
    for row in (ROWS.splitlines()[0] + ",more,and,more", "fast,here", "\0"):
        path.write_text(f"{COLUMNS}\n{row}\n")
        code, _, err = bench(capsys, "--runs", str(path))
        assert code == 2 and err.startswith("error: ") and "Traceback" not in err


def test_no_table_at_all(capsys: Capture) -> None:
    code, _, err = bench(capsys)
    assert code == 2 and "--runs" in err
