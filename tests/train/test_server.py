"""A parameter server: synchronous, it is the run that dp makes; asynchronous, within its bound; workers come and go."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.conftest import Run, Train, after_steps

from shoal.cli.main import BAD_INPUT, main
from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch import local
from shoal.launch.report import FAILED, FINISHED, STOPPED
from shoal.plan.resolve import resolve
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

FP64 = {"recipe__precision": "fp64", "recipe__states": "fp32"}


def same(one: Run, other: Run, within: float) -> None:
    assert [row["step"] for row in one.rows] == [row["step"] for row in other.rows]
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        for name in ("loss", "grad_norm", "lr", "targets", "heldout_loss"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=within), (mine["step"], name)
    first, second = one.checkpoint(), other.checkpoint()
    keys = {(piece.state, piece.tensor) for piece in first.manifest.pieces}
    assert keys == {(piece.state, piece.tensor) for piece in second.manifest.pieces}
    assert {state for state, _ in keys} == {"weight", "exp_avg", "exp_avg_sq"}
    for state, name in keys:
        mine, theirs = first.tensor(state, name), second.tensor(state, name)
        scale = float(theirs.abs().max()) or 1.0
        assert float((mine - theirs).abs().max()) / scale <= within, (state, name)


@pytest.mark.parametrize("servers", [1, 2])
def test_synchronous_mode_is_dp(train: Train, servers: int) -> None:
    plain = train("plain", "dp=2", **FP64)
    served = train(f"served-{servers}", "dp=2", server__servers=servers, **FP64)
    assert served.report.code == 0, served.report.message
    same(served, plain, 1e-12)
    for row in served.rows:
        assert set(row["workers"]) <= {0, 1}
        assert row["staleness"] == [0, 0] and row["world"] == 2 and row["layout"] == "dp=2"


@pytest.mark.parametrize("servers", [1, 2])
def test_asynchronous_mode_keeps_its_bound(train: Train, servers: int) -> None:
    run = train(
        "async", "dp=4", server__servers=servers, server__mode="async", server__staleness=2, recipe__steps=12,
        checkpoint__every=5,
    )  # fmt: skip
    assert run.report.code == 0, run.report.message
    assert [row["step"] for row in run.rows] == list(range(1, 13))
    staleness = [one for row in run.rows for one in row["staleness"]]
    assert len(staleness) == 48 and max(staleness) <= 2 and min(staleness) >= 0
    # Several workers compute at the same time.
    assert max(staleness) > 0
    assert run.rows[-1]["loss"] < run.rows[0]["loss"] and math.isfinite(run.rows[-1]["heldout_loss"])


def test_a_bound_of_zero_is_one_gradient_at_a_time(train: Train) -> None:
    run = train(
        "alone", "dp=2", server__servers=2, server__mode="async", server__staleness=0, recipe__steps=4
    )
    assert [row["staleness"] for row in run.rows] == [[0, 0]] * 4


def test_a_dp_run_continues_with_a_server_and_the_other_way_round(train: Train, tmp_path: Path) -> None:
    options = {**FP64, "recipe__steps": 60, "checkpoint__every": 1000, "recipe__lr": 1e-3}
    whole = train("whole", "dp=2", **options)
    done = 0
    for servers in (2, 0):
        with after_steps(tmp_path / "moved", done + 3, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            stopped = train("moved", "dp=2", server__servers=servers, **options)
        assert stopped.report.code == STOPPED, stopped.report.message
        assert done + 3 <= stopped.report.step == len(stopped.rows) < 60
        done = stopped.report.step
    moved = train("moved", "dp=2", server__servers=1, **options)
    assert moved.report.code == FINISHED, moved.report.message
    same(moved, whole, 1e-10)


def signal_worker(worker: int, number: signal.Signals) -> None:
    (process,) = [one for one in multiprocessing.active_children() if one.name == f"shoal-worker-{worker}"]
    assert process.pid is not None
    os.kill(process.pid, number)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_lost_worker_stops_no_other_and_rejoins(train: Train, tmp_path: Path, mode: str) -> None:
    options = {**FP64, "recipe__steps": 120, "checkpoint__every": 100, "recipe__lr": 1e-3}
    with after_steps(tmp_path / "lost", 10, lambda: signal_worker(1, signal.SIGKILL)):
        lost = train("lost", "dp=2", server__servers=2, server__mode=mode, **options)
    assert lost.report.code == FINISHED, lost.report.message
    assert [row["step"] for row in lost.rows] == list(range(1, 121))
    # No attempt was restarted, and the worker was there in the end.
    assert {row["attempt"] for row in lost.rows} == {lost.rows[0]["attempt"]}
    (fault,) = read_rows(lost.directory.faults)
    assert fault["kind"] == "worker lost" and fault["rank"] == 1 and "signal 9" in fault["message"]
    by_worker = [set(row["workers"]) for row in lost.rows]
    assert {0} in by_worker and 1 in set.union(*by_worker[-20:])
    if mode == "sync":
        same(lost, train("whole", "dp=2", **options), 1e-10)
    else:
        assert max(one for row in lost.rows for one in row["staleness"]) <= 4


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_gradient_that_one_server_has_and_the_other_not_is_used_once(
    train: Train, settings: Callable[..., list[str]], tmp_path: Path, mode: str
) -> None:
    """Its item is done again by another worker; the server that has it already does not take it twice."""
    options = {**FP64, "recipe__steps": 20, "checkpoint__every": 20, "recipe__lr": 1e-3}
    served = {"server__servers": 2, "server__mode": mode, **options}
    job = resolve(load(None, settings(**served), "dp=2").config)
    run = RunDirectory(tmp_path / "between")
    dies = "tests.train.slowed:dies_between_pushes"
    report = local.train(job, run, False, Console(stderr=True), entrypoint=dies)
    assert report.code == FINISHED, report.message
    rows = read_rows(run.metrics)
    # Of every step as many parts as there are, with all of the step's targets and no more.
    assert [len(row["workers"]) for row in rows] == [2] * 20
    assert len({row["targets"] for row in rows}) == 1
    (fault,) = read_rows(run.faults)
    assert fault["kind"] == "worker lost" and fault["rank"] == 1 and "signal 9" in fault["message"]
    assert "worker 1 ended with signal 9" in run.log(job.processes + 1).read_text()
    if mode == "sync":
        same(Run(report), train("whole", "dp=2", **options), 1e-10)


def test_a_worker_that_hangs_is_given_up(settings: Callable[..., list[str]], tmp_path: Path) -> None:
    options = {"recipe__steps": 40, "checkpoint__every": 0, "fault__timeout": 20}
    served = {"server__servers": 2, "server__mode": "async", **options}
    job = resolve(load(None, settings(**served), "dp=2").config)
    run = RunDirectory(tmp_path / "hangs")
    hangs = "tests.train.slowed:hangs_with_an_item"
    report = local.train(job, run, False, Console(stderr=True), entrypoint=hangs)
    assert report.code == FINISHED, report.message
    (fault,) = read_rows(run.faults)
    assert fault["kind"] == "worker lost" and fault["rank"] == 1
    assert [row["step"] for row in read_rows(run.metrics)] == list(range(1, 41))


def test_a_lost_server_is_restarted_from_the_last_commit(train: Train, tmp_path: Path) -> None:
    def kill_server() -> None:
        names = {one.name for one in multiprocessing.active_children()}
        servers = [
            one for one in multiprocessing.active_children() if not one.name.startswith("shoal-worker")
        ]
        assert len(servers) == 1, names
        assert servers[0].pid is not None
        os.kill(servers[0].pid, signal.SIGKILL)

    options = {"recipe__steps": 60, "checkpoint__every": 10}
    with after_steps(tmp_path / "killed", 25, kill_server):
        killed = train("killed", "dp=2", server__servers=1, **options)
    assert killed.report.code == FINISHED, killed.report.message
    assert [row["kind"] for row in read_rows(killed.directory.faults)] == ["killed", "restart"]
    assert killed.hexes == train("whole", "dp=2", server__servers=1, **options).hexes


def fails(*arguments: object) -> None:
    raise SystemExit(3)


def test_workers_that_only_fail_end_the_run(settings: Callable[..., list[str]], tmp_path: Path) -> None:
    job = resolve(load(None, settings(server__servers=1, fault__max_restarts=1), "dp=2").config)
    run = RunDirectory(tmp_path / "run")
    report = local.train(job, run, False, Console(stderr=True), entrypoint="tests.train.test_server:fails")
    assert report.code == FAILED and "fails again and again, and no other is left" in report.message
    for number in (0, 1):
        *_, last = run.log(job.processes + number).read_text().splitlines()
        assert (
            last == f"worker {number} ended with exit code 3 at step 0; left out: the others go on without it"
        )


@pytest.mark.parametrize("command", ["parity", "chaos"])
def test_commands_that_know_no_servers_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "server.servers=1", "--set", "cluster.on=2xcpu"]
    with pytest.raises(SystemExit) as ended:
        main([command, *given])
    assert ended.value.code == BAD_INPUT
    said = capsys.readouterr().err
    assert (
        f"server.servers = 1: shoal {command} knows ranks of a layout" in said and "server.servers=0" in said
    )


@pytest.mark.parametrize(
    ("layout", "more", "what", "fix"),
    [
        ("dp=2,fsdp=2", {}, "with fsdp: workers of a parameter server", "nearest legal layout: dp=4"),
        ("tp=2,pp=3", {}, "with tp, pp: workers", "nearest legal layout: dp=4"),
        ("dp=2", {"run__strict": True}, "server.servers with run.strict", "run.strict = false"),
        ("dp=2", {"recipe__precision": "fp16"}, 'recipe.precision = "fp16"', '"bf16" or "fp32"'),
    ],
)
def test_what_does_not_go_with_servers_is_refused(
    settings: Callable[..., list[str]], layout: str, more: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(BadInput) as refused:
        resolve(load(None, settings(server__servers=2, cluster__on="8xcpu", **more), layout).config)
    said = {problem.what: problem.fix for problem in refused.value.problems}
    assert any(what in one and fix in (answer or "") for one, answer in said.items()), said


def test_auto_is_replicas() -> None:
    config = load(None, ["server.servers=1", "cluster.on=2xH100", "model.preset=llama3-8b"], "auto").config
    assert str(resolve(config).layout) == "dp=2"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gradients_that_are_not_finite_are_not_applied(train: Train, mode: str) -> None:
    run = train(
        "wild", "dp=2", server__servers=2, server__mode=mode, recipe__lr=1e30, recipe__warmup=0,
        recipe__schedule="constant", fault__nonfinite="stop", fault__max_restarts=0,
    )  # fmt: skip
    assert run.report.code == FAILED and "not finite" in run.report.message
