"""``shoal bench comm``: measured on real ranks, stored where plan reads it; a ring to see; bad input told at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.facts import calibration
from shoal.facts.calibration import file
from shoal.facts.cluster.notation import find

Capture = pytest.CaptureFixture[str]


def comm(capsys: Capture, *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "comm", *arguments])
    return ended.value.code, *capsys.readouterr()


@pytest.mark.long
def test_every_operation_is_measured_and_the_planner_uses_the_fit(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(file.VARIABLE, str(tmp_path))
    picture = tmp_path / "comm.svg"
    code, out, _ = comm(capsys, "--on", "3xcpu", "--sizes", "6K,100000", "--picture", str(picture), "--json")
    found = json.loads(out)
    assert code == 0 and found["backend"] == "gloo" and found["ranks"] == 3
    assert found["link"]["kind"] == "loopback"
    operations = {"send", "broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert {call["op"] for call in found["calls"]} == operations
    # The largest whole number of values for each rank.
    assert {call["bytes"] for call in found["calls"]} == {6 * 2**10, 99_996}
    for call in found["calls"]:
        assert call["algorithm_bandwidth"] == pytest.approx(call["bytes"] / call["seconds"])
    assert all(fit["latency"] >= 0 and fit["bandwidth"] > 0 for fit in found["fits"])
    assert picture.read_text().startswith("<svg")

    assert file.use(Path(found["stored"]).parents[1]) == []
    used = calibration.find(find("3xcpu"))
    assert used.fast.model_dump() == found["rates"]
    assert used.measured is None and f"links measured ({found['stored']})" in used.words
    assert calibration.find(find("3xH100")).links == ""


def test_a_table_for_people_that_stores_nothing_when_told_so(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(file.VARIABLE, str(tmp_path))
    code, out, _ = comm(
        capsys, "--nproc", "2", "--operations", "all-reduce", "--sizes", "4K", "--on", "1xcpu"
    )
    assert code == 0 and "the catalogue's link: loopback, 2 GB/s" in out and "not stored" in out
    assert not list(tmp_path.iterdir())


def test_the_ring_is_shown_step_by_step(capsys: Capture) -> None:
    code, out, _ = comm(capsys, "--on", "3xcpu", "--show", "ring")
    assert code == 0 and out.count("reduce-scatter, step") == out.count("all-gather, step") == 2
    assert "0     chunk 0 to 1  chunk 2 from 2   0        0       *0+2" in out
    assert "Sent by each rank: 128 bytes; 2·(3-1)/3 of its 96: 128. The result is equal to" in out


@pytest.mark.long
def test_the_ranks_of_a_launcher_are_adopted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    asked = [
        "shoal",
        "bench",
        "comm",
        "--on",
        "2xcpu",
        "--sizes",
        "4K,64K",
        "--operations",
        "all_reduce",
        "--json",
    ]
    environment = {**os.environ, file.VARIABLE: str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *asked], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # One document, from the first rank alone.
    assert json.loads(done.stdout)["ranks"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--operations", "all_reduse"], "did you mean 'all_reduce'?"),
        (["--operations", ","], "--operations is empty"),
        (["--sizes", "4X"], "--sizes 4X: not a size"),
        (["--sizes", "9G"], "--sizes 9G: not a size"),
        (["--sizes", "4"], "less than one fp32 value for each of 2 ranks"),
        (["--nproc", "1"], "one rank has no other to send to"),
        (["--nproc", "65"], "not a number of ranks from 2 to 64"),
        (["--show", "star"], "--show star: nothing of that name"),
        (["--picture", "/no/such/folder/comm.svg"], "there is no directory /no/such/folder"),
    ],
)
def test_bad_input(capsys: Capture, words: list[str], said: str) -> None:
    code, out, err = comm(capsys, "--on", "1xcpu", *words, "--json")
    assert code == 2 and json.loads(out)["problems"] and said in err


def test_an_environment_that_names_no_rank(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**told, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = comm(capsys, "--on", "1xcpu")
    assert code == 2 and "the environment names no rank" in err


def test_damaged_links_are_a_warning(tmp_path: Path) -> None:
    path = file.links_file(tmp_path, "cpu")
    path.parent.mkdir()
    path.write_text('{"format": 1, "device": "H100"}')
    (warning,) = file.use(tmp_path)
    assert "run shoal bench comm, or delete the file" in warning
