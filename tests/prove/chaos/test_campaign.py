"""A short campaign on a real run: ranks, launcher and checkpoints struck, and nothing changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.shown import ROOT, put, words_of

from shoal.cli.main import main
from shoal.prove.chaos import picture
from shoal.prove.chaos.campaign import InjectedFault
from shoal.prove.chaos.experiment import judge
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

FAULTS = 11  # one of each kind
KINDS = (
    "SIGKILL,SIGSEGV,hang,closed connections,NaN in a gradient,bit flip in a weight,disk full,loader crash,"
    "flipped bit,torn manifest,launcher SIGKILL"
)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["chaos", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def overrides(settings: Callable[..., list[str]]) -> list[str]:
    values = settings(recipe__batch=4, cluster__on="4xcpu")
    return [word for value in values for word in ("--set", value)]


@pytest.mark.long
def test_a_short_campaign_changes_nothing(
    overrides: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "chaos"
    words = words_of("docs/chaos.md", "shoal chaos")
    options = put(words[3:], faults=FAULTS, layouts="dp=2;fsdp=2", kinds=KINDS, seed=2, run=folder)
    code = call(str(ROOT / words[2]), *options, "--json", *overrides)
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert len(found["faults"]) == FAULTS
    assert found["curve_identical"] and found["weights_identical"] and found["strict"]
    assert found["steps_lost"] == 0 and found["most_redone"] <= 1
    assert found["samples"]["once"] and found["samples"]["used"] == 4 * found["samples"]["steps"]
    assert all(fault["named_right"] is not False for fault in found["faults"]), err
    assert all(fault["recovered_s"] is not None for fault in found["faults"])
    assert any(fault["in_recovery"] for fault in found["faults"])
    assert {fault["layout"] for fault in found["faults"]} == {"dp=2", "fsdp=2"}
    assert "loss   " in err and (folder / "curve.svg").read_text().count("<circle") >= FAULTS

    # The proof can fail: a loss, a sample and a weight that are not those of the run without faults.
    run, reference = RunDirectory(folder / "run"), RunDirectory(folder / "reference")
    struck = [
        InjectedFault(**json.loads(line)) for line in (folder / "faults.jsonl").read_text().splitlines()
    ]
    assert judge(run, reference, struck, 0.0).holds
    ledger = run.ledger / "rank-00000.jsonl"
    whole = ledger.read_text()
    row = json.loads(whole.splitlines()[-1])
    row["samples"][0] += 1
    ledger.write_text("\n".join([*whole.splitlines()[:-1], json.dumps(row)]) + "\n")
    assert [text.split(":")[0] for text in judge(run, reference, struck, 0.0).proof.problems] == [
        f"step {row['step']}"
    ]
    ledger.write_text(whole)
    rows = read_rows(run.metrics)
    rows[4]["loss_hex"] = (float.fromhex(rows[4]["loss_hex"]) * (1 + 1e-7)).hex()
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert judge(run, reference, struck, 0.0).first_difference.startswith("step 5:")


@pytest.mark.long
def test_a_run_whose_states_are_in_files_survives(
    overrides: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every kind once, in the midst of steps that read and write scratch files; none of these is left."""
    folder, kinds = (
        tmp_path / "chaos",
        "SIGKILL,bit flip in a weight,flipped bit,NaN in a gradient,launcher SIGKILL",
    )
    words = words_of("docs/strategies/offload.md", "shoal chaos")
    shown = words[words.index("--layouts") + 1]
    layouts = f"fsdp=2,recompute=full,offload=optimizer@nvme+activations@nvme;{shown}"
    options = put(words[3:], faults=5, layouts=layouts, kinds=kinds, seed=1, run=folder)
    code = call(str(ROOT / words[2]), *options, "--json", *overrides)
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert len(found["faults"]) == 5 and found["curve_identical"] and found["weights_identical"]
    assert found["steps_lost"] == 0 and found["samples"]["once"]
    assert all(fault["named_right"] is not False for fault in found["faults"]), err
    assert not (folder / "run" / "scratch").exists()


def test_bad_input_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "chaos"
    assert call("--layouts", "dp=3;tp=2", "--kinds", "SIGKILL,gremlins", "--run", str(folder)) == 2
    err = capfd.readouterr().err
    assert "dp=3" in err and "tp=2" in err and "gremlins" in err and not folder.exists()
    folder.mkdir()
    (folder / "thesis.tex").touch()
    assert call("--run", str(folder), "--set", "cluster.on=8xcpu") == 2
    assert (
        folder / "thesis.tex"
    ).exists() and "something other than a chaos campaign" in capfd.readouterr().err
    assert call("--faults", "0") == 2


def test_the_picture_has_every_fault() -> None:
    rows = [{"step": step, "loss": 5.0 - step / 10} for step in range(1, 21)]
    struck = [InjectedFault(0, "SIGKILL", "step", 1, 2, "dp=2", step=3, recovered_s=1.0)] * 12
    assert picture.svg(rows, struck).count("<title>SIGKILL") == 12
    curve, marks = picture.lines(rows, struck, width=10)
    assert "+" in marks and len(curve.split()[1]) == 10
