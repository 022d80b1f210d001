"""``shoal train`` as ranks that others started: they train one run, stop together, and resume when started again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import Run, Train
from tests.docs.shown import put, words_of
from tests.launch.adopt.ranks import Started, free_port, slurm_task, steps, wait_for, words

from shoal.launch.report import BAD_INPUT, FINISHED, STOPPED, Report
from shoal.observe.flight_recorder import FlightReader
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Started] = []

    def begin(command: list[str], name: str, environment: dict[str, str] | None = None) -> Started:
        made.append(Started(command, tmp_path / f"{name}.log", environment or {}))
        return made[-1]

    yield begin
    for one in made:
        one.end()


def run_of(path: Path) -> Run:
    return Run(Report(FINISHED, path, 0, "", None, None))


@pytest.mark.long
def test_torchrun_restarts_a_lost_rank_and_the_curve_continues(
    start: Start, settings: Callable[..., list[str]], train: Train, tmp_path: Path
) -> None:
    options = {"recipe__schedule": "constant", "run__strict": True, "checkpoint__every": 1}
    values = words(settings(recipe__steps=40, cluster__on="2xcpu", **options))
    run = tmp_path / "run"
    typed = put(words_of("docs/launchers.md", "torchrun"), nproc_per_node=2, layout="fsdp=2", run=run)
    typed[typed.index("run.toml")] = str(tmp_path / "run.toml")
    typed.insert(typed.index("-m") + 1, "--")  # as the page says where --run is given
    (tmp_path / "run.toml").touch()
    agent = ["torch.distributed.run", "--standalone", "--max-restarts", "2"]
    world = start([*agent, *typed[1:], *values], "torchrun")
    wait_for(lambda: steps(run) >= 3, [world])
    seen = FlightReader(RunDirectory(run).flight(1)).look()
    assert seen is not None
    os.kill(seen.pid, signal.SIGKILL)
    assert world.code() == 0, world.words()
    assert "in use by a live run" not in world.words()
    assert "finished 40 steps" in world.words() and world.words().count("finished 40 steps") == 1
    faults = read_rows(run / "faults.jsonl")
    assert [row["rank"] for row in faults if row.get("action") == "left to torchrun to restart"] == [1]
    resumed = [row["resumed_step"] for row in faults if row["kind"] == "restart"]
    assert len(resumed) == 1 and resumed[0] >= 2
    whole = train("whole", "dp=1", recipe__steps=40, **options)
    assert run_of(run).hexes == whole.hexes and run_of(run).tensors() == whole.tensors()


@pytest.mark.long
def test_tasks_of_srun_stop_together_and_resume(
    start: Start, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """A signal to any of them stops all, with a commit; whoever competes for a rank is refused meanwhile."""
    values = words(settings(recipe__steps=100_000, cluster__on="2xcpu", checkpoint__every=1000))
    run, port = tmp_path / "run", free_port()
    command = [
        "shoal",
        "train",
        "--run",
        str(run),
        "--layout",
        "dp=2",
        "--meet",
        f"127.0.0.1:{port}",
        *values,
    ]
    ranks = [start(command, f"rank-{rank}", slurm_task(rank, 2, port)) for rank in range(2)]
    wait_for(lambda: steps(run) >= 2, ranks)
    rival = start(command, "rival", slurm_task(1, 2, port))
    assert rival.code() == BAD_INPUT and "rank 1 is taken: process" in rival.words()
    os.kill(ranks[1].process.pid, signal.SIGUSR1)
    assert [one.code() for one in ranks] == [STOPPED, STOPPED], ranks[0].words() + ranks[1].words()
    done = steps(run)
    assert RunDirectory(run).step() == done
    assert f"stopped after step {done}, committed" in ranks[0].words()
    assert not (run / ".alive").exists()

    again = [start(command, f"again-{rank}", slurm_task(rank, 2, port)) for rank in range(2)]
    wait_for(lambda: steps(run) > done, again)
    for one in again:
        os.kill(one.process.pid, signal.SIGTERM)
    assert [one.code() for one in again] == [STOPPED, STOPPED]
    assert f"resuming {run} after step {done}" in again[0].words()
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, steps(run) + 1))


@pytest.mark.long
def test_ranks_that_cannot_be_one_run_are_refused_together(
    start: Start, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """In one line each on every node, before a directory is made: another config, a layout of other ranks."""
    run, port = tmp_path / "run", free_port()
    codes = {}
    for name, layout, more, said in (
        (
            "config",
            "dp=2",
            {1: ["--set", "recipe.lr=0.5"]},
            "config recipe.lr is 0.01 on rank 0 but 0.5 on rank 1",
        ),
        ("layout", "dp=4", {}, "layout dp=4 has 4 rank(s), and srun started 2"),
    ):
        values = words(settings(cluster__on="4xcpu"))
        command = ["shoal", "train", "--json", "--run", str(run), "--layout", layout, *values]
        ranks = [
            start([*command, *more.get(rank, [])], f"{name}-{rank}", slurm_task(rank, 2, port))
            for rank in range(2)
        ]
        codes[name] = [one.code() for one in ranks]
        text = ranks[0].words()
        assert said in text and "Traceback" not in text, text
        assert json.loads(text[text.index("{") :])["exit_code"] == BAD_INPUT
        assert not run.exists()
    assert codes == {"config": [BAD_INPUT, BAD_INPUT], "layout": [BAD_INPUT, BAD_INPUT]}
    # Two nodes, each with a directory of its own, and no store for the state.
    values = words(settings(cluster__on="2xcpu"))
    own = [tmp_path / name / "run" for name in "ab"]
    nodes = []
    for rank, path in enumerate(own):
        path.parent.mkdir()
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = ["shoal", "train", "--run", str(path), "--layout", "dp=2", *values]
        nodes.append(start(command, f"node-{rank}", {**told, **place}))
    assert [one.code() for one in nodes] == [BAD_INPUT, BAD_INPUT], nodes[0].words() + nodes[1].words()
    assert all("it is not shared" in one.words() for one in nodes) and not any(path.exists() for path in own)
    refused = start(["shoal", "train", "--run", str(run), "--nodes", "2"], "two", slurm_task(0, 2, port))
    assert refused.code() == BAD_INPUT and "two launchers for the same ranks" in refused.words()
