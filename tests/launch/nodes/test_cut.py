"""What needs root: two nodes with a network between them, and that is cut."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import Run, Train
from tests.launch.namespaces import ip
from tests.launch.nodes.processes import Nodes

from shoal.launch.report import STOPPED, Report

pytestmark = pytest.mark.system


def test_a_node_whose_network_is_cut_is_left_out_and_comes_back(
    machines: dict[str, str], settings: Callable[..., list[str]], train: Train, tmp_path: Path
) -> None:
    options = {"recipe__schedule": "constant", "checkpoint__every": 100_000, "run__strict": True}
    together = {"recipe__steps": 90_000, "cluster__on": "4xcpu", "cluster__interface": "eth0"}
    values = settings(**options, **together, checkpoint__memory=1, fault__timeout=5)
    nodes = Nodes(tmp_path / "run", "1:2", "dp=2,fsdp=2", values)
    try:
        made = {
            node: nodes.start(node, prefix=["ip", "netns", "exec", name]) for node, name in machines.items()
        }
        nodes.wait_for_world(4)
        nodes.wait_for_steps(3)
        led, follows = ("a", "b") if "led from" in made["b"].words() else ("b", "a")
        sockets = subprocess.run(
            ["ip", "netns", "exec", machines[led], "ss", "-Hltn"], capture_output=True, text=True
        )
        listening = {line.split()[3].rpartition(":")[0] for line in sockets.stdout.splitlines()}
        assert listening and listening <= {"10.77.0.1", "10.77.0.2", "127.0.0.1"}

        ip("-n", machines[follows], "link", "set", "eth0", "down")
        assert nodes.wait_for_fault("node lost")["node"] == follows
        nodes.wait_for_world(2)
        nodes.wait_for_steps(2)
        ip("-n", machines[follows], "link", "set", "eth0", "up")
        nodes.wait_for_world(4)
        nodes.wait_for_steps(2)
        os.kill(made[led].process.pid, signal.SIGTERM)
        assert [node.code() for node in made.values()] == [STOPPED, STOPPED]
    finally:
        nodes.end()
    found = Run(Report(STOPPED, nodes.run.path, nodes.step(), "", None, None))
    whole = train("whole", "dp=1", recipe__steps=nodes.step(), **options)
    assert found.hexes == whole.hexes and found.tensors() == whole.tensors()
