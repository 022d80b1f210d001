"""A job as data: what is written for whom, what is refused before that, and the background of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.command import Capture, shoal_
from tests.docs.shown import words_of

from shoal.launch.jobs.job import seconds_of
from shoal.train.run_directory import RunDirectory

TWO_NODES = ["--set", "cluster.on=2x8xH100", "--set", "cluster.interface=ib0", "--layout", "fsdp=16"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_shows_the_batch_file_and_writes_nothing(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = shoal_(
        capsys, "launch", "--to", "slurm", *TWO_NODES, "--time", "4:00:00", "--partition", "gpu", "--dry-run"
    )
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    lines = out.splitlines()
    for line in (
        "nodes=2",
        "gpus-per-node=8",
        "time=0-04:00:00",
        "partition=gpu",
        "requeue",
        "signal=B:USR1@120",
    ):
        assert f"#SBATCH --{line}" in lines
    # The shell agrees that it is a shell's file.
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)
    (step,) = [line for line in lines if " train " in line]
    assert '--nodes 2 --node "$SLURMD_NODENAME"\'' in step


def test_containers_and_fewer_nodes_are_said_to_srun(capsys: Capture) -> None:
    more = ["--image", "shoal.sqsh", "--mount", "/data:/data", "--nodes", "1:2", "--option=--qos=high"]
    _, out, _ = shoal_(capsys, "launch", "--to", "slurm", *TWO_NODES, *more, "--dry-run")
    run = Path.cwd() / "runs" / "default"
    assert f"--container-image=shoal.sqsh --container-mounts={run}:{run},/data:/data" in out
    assert "exec shoal train " in out and "--nodes 1:2" in out
    assert "#SBATCH --qos=high" in out and "#SBATCH --no-kill" in out and "srun" in out


@pytest.mark.parametrize(
    ("words", "said", "fix"),
    [
        (["--to", "slrum"], "--to slrum: there is no such target", "did you mean 'slurm'?"),
        (["--to", "slurm"], "cluster.on = local: that is this machine", "cluster.on=2x8xH100"),
        (
            ["--to", "slurm", "--set", "cluster.on=2x8xH100", "--layout", "dp=16"],
            "no cluster.interface",
            "eth0",
        ),
        (["--to", "slurm", *TWO_NODES, "--nodes", "1"], "16 ranks on each", "--nodes 2"),
        (["--to", "slurm", *TWO_NODES, "--nodes", "3"], "not as many on each of 3 nodes", "--nodes"),
        (["--to", "slurm", *TWO_NODES, "--time", "soon"], "--time soon: not a time limit", "4:00:00"),
        (["--to", "slurm", *TWO_NODES, "--option", "reservation=x"], "no option of sbatch", "--option=--"),
        (["--to", "local", *TWO_NODES], "--to local is one machine", "--to slurm"),
        (
            ["--to", "slurm", *TWO_NODES, "--restarts", "-1"],
            "--restarts -1: Input should be greater",
            "--help",
        ),
        (["--to", "local", "--restarts", "0"], "--restarts says nothing to local", "--to slurm or ray"),
        (["--to", "kubernetes", *TWO_NODES, "--pod", "no.yaml"], "--pod: there is no file", "YAML"),
        (["--to", "local", "--partition", "gpu"], "--partition says nothing to local", "--to slurm"),
    ],
)
def test_what_cannot_be_launched_is_one_message(
    words: list[str], said: str, fix: str, capsys: Capture, tmp_path: Path
) -> None:
    code, out, err = shoal_(capsys, "launch", *words, "--submit")
    assert (code, out) == (2, "")
    message, advice = err.splitlines()
    assert message.startswith("error: ") and said in message
    assert advice.startswith("  fix: ") and fix in advice
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_slurm_says_so(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = shoal_(capsys, "launch", "--to", "slurm", *TWO_NODES, "--submit")
    assert code == 2 and err.startswith("error: sbatch is not on this machine\n  fix: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("4:00:00", 14400), ("2-12", 216000), ("1-00:30:00", 88200)],
)
def test_time_limits_are_slurms(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


def test_the_written_config_is_the_submitted_one(capsys: Capture, tmp_path: Path) -> None:
    """Changed later, the user's file changes no job that waits."""
    (tmp_path / "mine.toml").write_text(
        'layout = "auto"\n[recipe]\nbatch = 32\n[data]\nsource = "text.txt"\n'
    )
    (tmp_path / "text.txt").write_text("words\n")
    code, out, _ = shoal_(
        capsys, "launch", "mine.toml", "--to", "slurm", "--set", "cluster.on=4xcpu", "--json"
    )
    assert code == 0
    told = json.loads(out)
    config = tomllib.loads((tmp_path / "runs" / "mine" / "job" / "config.toml").read_text())
    assert config["layout"] == told["layout"] != "auto" and config["recipe"]["batch"] == 32
    assert config["data"]["source"] == str(tmp_path / "text.txt")
    assert (tmp_path / "runs" / "mine" / "job").stat().st_mode & 0o777 == 0o700
    # What was only written is no run yet, and no other's directory.
    RunDirectory(tmp_path / "runs" / "mine").check_place()
    assert shoal_(capsys, "status", "runs/mine")[0] == 2
    assert shoal_(capsys, "ls")[1].startswith("no jobs in runs")


@pytest.mark.long
def test_a_job_in_the_background_of_this_machine(settings: Callable[..., list[str]], tmp_path: Path) -> None:
    values = [word for value in settings(recipe__steps=90_000) for word in ("--set", value)]
    status, logs = words_of("docs/clusters.md", "shoal status"), words_of("docs/clusters.md", "shoal logs")
    cancel, ls = words_of("docs/clusters.md", "shoal cancel runs"), words_of("docs/clusters.md", "shoal ls")

    def shoal(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    run = status[2]
    done = shoal("launch", "--to", "local", "--run", run, *values, "--submit", "--no-follow")
    assert done.returncode == 0, done.stderr

    def state() -> dict[str, object]:
        found: dict[str, object] = json.loads(shoal(*status[1:], "--json").stdout)
        return found

    deadline = time.monotonic() + 240
    while not state()["step"]:
        assert time.monotonic() < deadline, (tmp_path / run / "job" / "local.log").read_text()
    assert state()["state"] == "running"
    assert "finishes its step" in shoal(*cancel[1:]).stdout
    while state()["state"] == "running":
        assert time.monotonic() < deadline
    found = state()
    assert (found["state"], found["exit_code"]) == ("cancelled", 75)
    assert RunDirectory(tmp_path / run).step() == found["step"]
    assert shoal(*cancel[1:]).returncode == 2
    assert "stopped after step" in shoal(*logs[1:]).stdout
    assert f"{found['step']}/90000" in shoal(*ls[1:]).stdout


def test_a_job_that_never_gets_a_step_further_is_not_put_back_for_ever(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch file's own shell, where every launcher is killed as one that has no memory left."""
    assert shoal_(capsys, "launch", "--to", "slurm", *TWO_NODES, "--run", "run")[0] == 0
    (tmp_path / "bin").mkdir()
    words = {
        "srun": 'case "$*" in *train*) exit 137;; esac',
        "squeue": "echo RUNNING",
        "scontrol": 'echo "$@"',
    }
    for name, text in words.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def started(restart: int) -> str:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        done = subprocess.run(["bash", "run/job/job.sbatch"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (137, "")
        return done.stdout

    ended = Path("run/job/exit")
    for restart in range(8):
        assert "requeue 7" in started(restart)
    # A step more, and it counts anew.
    Path("run/heartbeat").write_text("12\n")
    for restart in range(8, 18):
        assert "requeue 7" in started(restart) and not ended.exists()
    assert "10 restarts in a row without a step beyond 12" in started(18)
    assert ended.read_text() == "7 137\n"
