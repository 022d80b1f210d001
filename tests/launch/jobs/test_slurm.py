"""Jobs of a real Slurm, four nodes on this machine: a node is lost, the time is up, and the run stays the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Run, Train
from tests.docs.shown import put, words_of
from tests.launch.jobs.slurm_cluster import INTERFACE, SlurmCluster, install

from shoal.launch.report import STOPPED, Report
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

pytestmark = pytest.mark.system
# On a busy machine the start of a launcher alone may take a minute.
SECONDS = 900.0
OPTIONS: dict[str, Any] = {"recipe__schedule": "constant", "checkpoint__every": 100_000, "run__strict": True}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if why := install():
        pytest.skip(why)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), 4)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class SlurmRun:
    """A run that is trained as a job, and the commands that a user has for it."""

    def __init__(self, slurm: SlurmCluster, path: Path, values: list[str]) -> None:
        self.slurm, self.run = slurm, RunDirectory(path)
        self.values = [word for value in values for word in ("--set", value)]

    def shoal(self, *words: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.slurm.run(
            sys.executable, "-m", "shoal", *words, check=False, timeout=SECONDS, env=env
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def launch(self, *more: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        words = ["launch", "--to", "slurm", "--run", str(self.run.path), "--layout", "dp=2,fsdp=2"]
        return self.shoal(*words, *self.values, *more, check=check, **env)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.shoal("status", str(self.run.path), "--json").stdout)
        return found

    def told(self) -> dict[str, str]:
        """What Slurm itself says, at less cost than ``status``."""
        words = self.slurm.run("scontrol", "--oneliner", "show", "job", self.id()).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def nodes(self) -> list[str]:
        found: str = self.slurm.run("scontrol", "show", "hostnames", self.told()["NodeList"]).stdout
        return found.split()

    def id(self) -> str:
        found: str = json.loads((self.run.path / "job.json").read_text())["id"]
        return found

    def step(self) -> int:
        rows = read_rows(self.run.metrics)
        return int(rows[-1]["step"]) if rows else 0

    def log(self) -> str:
        path = self.run.path / "job" / "slurm.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            said = f"{what} did not happen\n{self.log()[-3000:]}"
            assert time.monotonic() < deadline, said
            time.sleep(0.25)

    def wait_for_steps(self, count: int) -> None:
        wanted = self.step() + count
        self.wait(lambda: self.step() >= wanted, "progress")

    def end(self) -> Run:
        """Cancelled as a user does it: after a step, with a commit."""
        self.shoal("cancel", str(self.run.path))
        self.wait(lambda: self.told()["JobState"] == "FAILED", "the end of the job")
        assert self.status()["state"] == "cancelled"
        assert self.run.step() == self.step()
        return Run(Report(STOPPED, self.run.path, self.step(), "", None, None))


@pytest.fixture
def on_slurm(
    slurm: SlurmCluster, settings: Callable[..., list[str]], tmp_path: Path
) -> Callable[..., SlurmRun]:
    def make(place: Path | None = None, **overrides: Any) -> SlurmRun:
        together = {"recipe__steps": 90_000, "cluster__on": "2x2xcpu", "cluster__interface": INTERFACE}
        values = settings(**{**OPTIONS, **together, "fault__timeout": 5, **overrides})
        return SlurmRun(slurm, place or tmp_path / "run", values)

    return make


def test_a_node_goes_down_and_the_job_goes_back_into_the_queue_and_on(
    slurm: SlurmCluster, on_slurm: Callable[..., SlurmRun], train: Train
) -> None:
    job = on_slurm(checkpoint__every=5)
    job.launch("--submit", "--no-follow")
    job.wait_for_steps(8)
    found = job.status()
    assert (found["state"], found["nodes"], found["restarts"]) == ("running", "n[1-2]", 0)
    assert {row["world"] for row in read_rows(job.run.metrics)} == {4}
    # Two jobs at one run would compete for it.
    again = job.launch("--submit", "--no-follow", check=False)
    assert again.returncode == 2 and f"has a job already: slurm {job.id()} is running" in again.stderr

    slurm.set_node("n2", "DOWN")
    try:
        job.wait(lambda: job.told()["Restarts"] == "1", "a restart")
        job.wait(lambda: job.told()["JobState"] == "RUNNING", "the job on other nodes")
        job.wait_for_steps(8)
        found = job.status()
        assert (found["state"], found["restarts"]) == ("running", 1)
        assert "2" not in found["nodes"]  # n[1,3], or n[3-4] where n1 is still busy with the end of the first
    finally:
        slurm.set_node("n2", "RESUME")
    ended = job.end()
    whole = train("whole", "dp=1", recipe__steps=job.step(), **{**OPTIONS, "checkpoint__every": 5})
    assert ended.hexes == whole.hexes and ended.tensors() == whole.tensors()
    assert slurm.run("squeue", "--noheader").stdout == ""


def test_before_the_time_limit_the_run_commits_and_the_job_starts_again(
    slurm: SlurmCluster, on_slurm: Callable[..., SlurmRun], train: Train
) -> None:
    job = on_slurm()
    job.launch("--submit", "--no-follow", "--time", "60", "--warning", "600")
    job.wait_for_steps(5)
    assert job.run.step() == 0  # nothing is committed before the end: what is lost would be seen
    hours, minutes, _ = map(int, job.told()["RunTime"].split(":"))
    slurm.run("scontrol", "update", f"JobId={job.id()}", f"TimeLimit={hours * 60 + minutes + 4}")
    job.wait(lambda: job.run.step() > 0, "a commit")
    job.wait(lambda: job.told()["Restarts"] == "1", "a restart")
    slurm.run("scontrol", "update", f"JobId={job.id()}", "TimeLimit=60")
    committed = job.run.step()
    assert read_rows(job.run.metrics)[-1]["step"] >= committed
    job.wait(lambda: job.step() > committed + 3, "progress after the restart")
    # The step that was under way was finished, and the next start continued after it.
    assert not read_rows(job.run.faults)
    assert f"stopped after step {committed}, committed" in job.log()
    assert "exit 75: back into the queue, restart 1" in job.log()
    ended = job.end()
    whole = train("whole", "dp=1", recipe__steps=job.step(), **OPTIONS)
    assert ended.hexes == whole.hexes and ended.tensors() == whole.tensors()


def test_with_fewer_nodes_allowed_a_lost_node_ends_nothing(
    slurm: SlurmCluster, on_slurm: Callable[..., SlurmRun], train: Train
) -> None:
    job = on_slurm(checkpoint__memory=1)
    job.launch("--submit", "--no-follow", "--nodes", "1:2")
    job.wait_for_steps(5)
    _, second = job.nodes()
    slurm.lose_node(second)
    try:
        job.wait(lambda: read_rows(job.run.metrics)[-1]["world"] == 2, "steps on the node that is left")
        job.wait_for_steps(3)
        assert (job.told()["JobState"], job.told()["Restarts"]) == ("RUNNING", "0")
    finally:
        slurm.start_node(second)
        slurm.set_node(second, "RESUME")
    ended = job.end()
    whole = train("whole", "dp=1", recipe__steps=job.step(), **OPTIONS)
    assert ended.hexes == whole.hexes and ended.tensors() == whole.tensors()


def test_a_directory_that_is_not_shared_is_one_line_before_launchers_start(
    slurm: SlurmCluster, on_slurm: Callable[..., SlurmRun]
) -> None:
    job = on_slurm(slurm.place / "private" / "run")
    done = job.launch("--submit", "--option=--nodelist=n1,n2", check=False)
    assert done.returncode == 2, done.stderr
    assert "node n2 does not see" in done.stderr and "is not shared; fix: --run on a shared" in done.stderr
    assert job.status()["state"] == "failed" and not job.run.metrics.exists()


def test_what_slurm_does_not_take_is_one_line_and_nothing_is_written(
    on_slurm: Callable[..., SlurmRun],
) -> None:
    job = on_slurm()
    for words, said, fix in (
        (["--partition", "mian"], "--partition mian: Slurm has no such partition", "--partition main"),
        (["--nodes", "2", "--option=--nodes=9"], "Slurm does not take the job (2 nodes of 2 cores)", "sinfo"),
        (["--option=--bogus"], "unrecognized option '--bogus'", "sinfo"),
        (["--image", "x"], "--image: this Slurm has no pyxis", "leave it out"),
    ):
        done = job.launch("--submit", *words, check=False)
        assert done.returncode == 2, done.stderr
        message, advice = done.stderr.splitlines()
        assert message.startswith("error: ") and said in message, message
        assert advice.startswith("  fix: ") and fix in advice, advice
        assert not job.run.path.exists()


def test_no_misspelt_option_of_the_batch_file_is_taken(
    slurm: SlurmCluster, on_slurm: Callable[..., SlurmRun]
) -> None:
    shown = json.loads(on_slurm().launch("--dry-run", "--json", "--time", "60", "--partition", "main").stdout)
    (text,) = shown["files"].values()
    assert slurm.run("sbatch", "--test-only", input=text).returncode == 0
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert len(options) > 8
    for line in options:
        name, equals, value = line.partition("=")
        for wrong in (f"{name}x{equals}{value}",):
            done = slurm.run("sbatch", "--test-only", input=text.replace(line, wrong), check=False)
            assert done.returncode != 0, f"Slurm takes {wrong}"


def test_a_node_with_another_version_is_named_and_left_out(
    slurm: SlurmCluster, on_slurm: Callable[..., SlurmRun], tmp_path: Path
) -> None:
    """The doctor as a step of a job of all nodes; then a job without the one that it names."""
    program = tmp_path / "doctor"
    other = (
        "import sys, shoal; shoal.__version__ = '0.0.9'; from shoal.cli.main import main; sys.exit(main())"
    )
    program.write_text(
        f"""#!/bin/bash
[ "$SLURMD_NODENAME" = n3 ] && exec {sys.executable} -c "{other}" doctor "$@"
exec {sys.executable} -m shoal doctor "$@"
"""
    )
    program.chmod(0o700)
    words = words_of("docs/clusters.md", "srun -N4")
    words[words.index("shoal") : words.index("doctor") + 1] = [str(program)]
    words = [*put(words, run=tmp_path / "runs", interface=INTERFACE), "--json"]
    done = slurm.run(*words, check=False, timeout=SECONDS)
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert done.returncode == 1 and found["exclude"] == ["n3"], done.stdout + done.stderr
    assert checks["nodes"]["detail"] == "n1 n2 n3 n4"
    assert checks["Shoal"]["nodes"] == ["n3"] and "0.0.9 on n3" in checks["Shoal"]["detail"]
    assert "4 ranks" in checks["all-reduce of all"]["detail"] and "Traceback" not in done.stderr
    job = on_slurm(recipe__steps=6)
    told = json.loads(job.launch("--submit", "--json", "--exclude", "n1,n3").stdout)
    assert told["state"] == "finished" and job.nodes() == ["n2", "n4"]


@pytest.mark.parametrize(
    "typed",
    [
        words_of("docs/launchers.md", "srun --ntasks-per-node=8"),
        words_of("docs/launchers.md", "srun --ntasks-per-node=1"),
    ],
    ids=["ranks", "nodes"],
)
def test_srun_starts_every_rank_or_a_launcher_on_every_node(
    typed: list[str], slurm: SlurmCluster, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """As the page has it, on two nodes of two cores."""
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "run.toml").touch()
    values = settings(cluster__on="2x2xcpu", cluster__interface=INTERFACE)
    words = put(typed, layout="fsdp=4", run=run.path)
    words = [word.replace("--ntasks-per-node=8", "--ntasks-per-node=2") for word in words]
    words[words.index("shoal") : words.index("shoal") + 1] = [sys.executable, "-m", "shoal"]
    words[words.index("run.toml")] = str(tmp_path / "run.toml")
    words += [word for value in values for word in ("--set", value)]
    done = slurm.run(words[0], "-N2", *words[1:], check=False, timeout=SECONDS)
    assert done.returncode == 0 and "finished 6 steps" in done.stdout, done.stdout + done.stderr
    assert {(row["step"], row["world"]) for row in read_rows(run.metrics)} == {
        (step, 4) for step in range(1, 7)
    }


def test_a_job_is_followed_to_its_end_and_listed(on_slurm: Callable[..., SlurmRun], tmp_path: Path) -> None:
    job = on_slurm(tmp_path / "a name's spaces", recipe__steps=6)
    # Typed within another job, of which srun would take the memory of a core, and refuse that of a node.
    within = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "10", "SLURM_NNODES": "3", "SLURM_NTASKS": "3"}
    done = job.launch("--submit", "--json", "--option=--mem=1000", **within)
    told = json.loads(done.stdout)
    assert (told["state"], told["exit_code"], told["submitted"]) == ("finished", 0, True)
    assert "finished 6 steps" in done.stderr and job.run.step() == 6
    (row,) = json.loads(job.shoal("ls", str(job.run.path.parent), "--json").stdout)["jobs"]
    assert (row["id"], row["state"], row["step"], row["steps"]) == (told["id"], "finished", 6, 6)
    assert "finished 6 steps" in job.shoal("logs", str(job.run.path)).stdout
    assert job.shoal("logs", str(job.run.path), "--rank", "3").returncode == 0
    over = job.shoal("cancel", str(job.run.path), check=False)
    assert over.returncode == 2 and "is over: finished" in over.stderr
