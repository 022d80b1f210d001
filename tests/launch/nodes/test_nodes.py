"""Several nodes at one run: lost, stopped and back again, it stays the same run. Each node is a launcher of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import Run, Train
from tests.launch.nodes.processes import Nodes

from shoal.launch.report import FAILED, STOPPED, Report

Start = Callable[..., Nodes]


@pytest.fixture
def on_nodes(settings: Callable[..., list[str]], tmp_path: Path) -> Iterator[Start]:
    made: list[Nodes] = []

    def start(count: str = "2", layout: str = "dp=2,fsdp=2", **overrides: object) -> Nodes:
        options = {"run__strict": True, "cluster__on": "4xcpu", "fault__timeout": 5, **overrides}
        nodes = Nodes(tmp_path / "run", count, layout, settings(**options))
        made.append(nodes)
        return nodes

    yield start
    for nodes in made:
        nodes.end()


@pytest.mark.long
def test_nodes_are_lost_and_come_back_and_the_run_stays_the_same(on_nodes: Start, train: Train) -> None:
    """Nothing is committed to disk before the end: what goes on was in the other node's memory."""
    options = {"recipe__schedule": "constant", "checkpoint__every": 100_000}
    nodes = on_nodes("1:2", recipe__steps=90_000, checkpoint__memory=1, **options)
    first = nodes.start("a")
    second = nodes.start("b")
    nodes.wait_for_world(4)
    nodes.wait_for_steps(3)
    led, follows = (first, second) if "led from" in second.words() else (second, first)

    follows.lose()
    told = nodes.wait_for_fault("node lost")
    assert told["node"] == follows.name and told["rank"] == 2
    assert f"node {follows.name} (ranks 2,3) has not been heard from" in told["message"]
    nodes.wait_for_world(2)
    assert nodes.wait_for_fault("nodes")["message"] == f"1 of 2 nodes joined: {led.name}"
    assert nodes.wait_for_fault("restart")["resumed_step"] >= 2
    follows.start()
    nodes.wait_for_world(4)
    assert f"node {follows.name} has joined" in led.words()
    nodes.wait_for_steps(3)

    before = nodes.step()
    led.lose()
    assert nodes.wait_for_fault("launcher lost")["step"] >= before - 1
    nodes.wait_for_world(2)
    nodes.wait_for_steps(2)
    led.start()
    nodes.wait_for_world(4)
    nodes.wait_for_steps(2)
    os.kill(led.process.pid, signal.SIGTERM)
    assert (first.code(), second.code()) == (STOPPED, STOPPED), first.words() + second.words()

    found = Run(Report(STOPPED, nodes.run.path, nodes.step(), "", None, None))
    whole = train("whole", "dp=1", recipe__steps=nodes.step(), run__strict=True, **options)
    assert found.hexes == whole.hexes and found.tensors() == whole.tensors()


@pytest.mark.long
def test_faults_on_another_node_are_named_and_a_stop_is_for_all(on_nodes: Start) -> None:
    nodes = on_nodes(recipe__steps=5000, checkpoint__every=1)
    a, b = nodes.start("a"), nodes.start("b")
    nodes.wait_for_steps(3)
    os.kill(nodes.rank(3), signal.SIGKILL)
    told = nodes.wait_for_fault("killed")
    assert told["rank"] == 3 and "SIGKILL" in told["message"]
    nodes.wait_for_steps(4)
    os.kill(nodes.rank(2), signal.SIGSTOP)
    stalled = nodes.wait_for_fault("stall")
    assert stalled["rank"] == 2 and "stopped by a signal" in stalled["message"]
    nodes.wait_for_steps(3)
    os.kill(b.process.pid, signal.SIGTERM)
    assert (a.code(), b.code()) == (STOPPED, STOPPED), a.words() + b.words()
    assert nodes.run.step() == nodes.step() and not (nodes.run.path / ".meeting").exists()

    # A failure for good is everybody's too.
    nodes = on_nodes(recipe__steps=5000, checkpoint__every=1, fault__max_restarts=0)
    a, b = nodes.start("a"), nodes.start("b")
    nodes.wait_for_steps(2)
    os.kill(nodes.rank(3), signal.SIGKILL)
    assert (a.code(), b.code()) == (FAILED, FAILED)
    for node in (a, b):
        assert "rank 3 failed: killed by SIGKILL; failed once without a new commit" in node.words()
