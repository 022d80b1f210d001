"""Nodes that share no directory meet at a host and a port; each has its own run directory, the state is in a store."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import Run, Train
from tests.docs.shown import put, words_of
from tests.launch.adopt.ranks import Started, free_port, steps, wait_for, words

from shoal.launch.report import BAD_INPUT, STOPPED, Report

Start = Callable[..., Started]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Start]:
    """A launcher whose working directory is its own disk."""
    made: list[Started] = []
    place = f"127.0.0.1:{free_port()}"

    def begin(name: str, values: list[str], shared: bool = True) -> Started:
        run = tmp_path / name / "run"
        run.parent.mkdir(exist_ok=True)
        (run.parent / "run.toml").touch()
        typed = words_of("docs/launchers.md", "shoal train run.toml --nodes 2")
        typed[typed.index("run.toml")] = str(run.parent / "run.toml")
        store = typed.index("checkpoint.to=s3://bucket/runs")
        typed[store - 1 : store + 1] = ["--set", f"checkpoint.to=file://{tmp_path}/store"] if shared else []
        command = put(typed, run=run, node=name, meet=place, layout="dp=2")
        made.append(Started([*command, *words(values)], tmp_path / f"{name}.log", {}))
        return made[-1]

    yield begin
    for one in made:
        one.end()


@pytest.mark.long
def test_nodes_without_a_shared_directory_train_one_run(
    node: Start, settings: Callable[..., list[str]], train: Train, tmp_path: Path
) -> None:
    options = {"recipe__schedule": "constant", "run__strict": True, "checkpoint__every": 1}
    together = {"recipe__steps": 90_000, "cluster__on": "2xcpu", "fault__timeout": 5}
    values = settings(**options, **together)
    a, b = (node(name, values) for name in "ab")

    def led() -> str:
        return next((name for name in "ab" if steps(tmp_path / name / "run")), "")

    first = wait_for(led, [a, b])
    run, other = tmp_path / first / "run", tmp_path / ({"a": "b", "b": "a"}[first]) / "run"
    wait_for(lambda: steps(run) >= 3, [a, b])
    follows = b if first == "a" else a
    follows.end()
    before = steps(run)
    follows = node(other.parent.name, values)
    wait_for(lambda: steps(run) > before + 2, [a, b, follows])
    leads = a if first == "a" else b
    os.kill(follows.process.pid, signal.SIGTERM)
    assert [leads.code(), follows.code()] == [STOPPED, STOPPED], leads.words() + follows.words()
    assert not (other / "metrics.jsonl").exists() and (other / "logs" / "rank-00001.log").exists()
    assert (other / "manifest.json").exists() and not [*(run / "checkpoints").iterdir()]
    found = Run(Report(STOPPED, run, steps(run), "", None, None))
    whole = train("whole", "dp=1", recipe__steps=steps(run), **options)
    assert found.hexes == whole.hexes and found.tensors() == whole.tensors()


@pytest.mark.long
def test_a_directory_that_is_not_shared_and_no_store_are_refused(
    node: Start, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    values = settings(cluster__on="2xcpu")
    both = [node(name, values, shared=False) for name in "ab"]
    assert [one.code() for one in both] == [BAD_INPUT, BAD_INPUT], both[0].words() + both[1].words()
    for one in both:
        assert "it is not shared" in one.words() and "Traceback" not in one.words()
    assert not (tmp_path / "a" / "run").exists() and not (tmp_path / "b" / "run").exists()
