"""``shoal doctor --cluster`` on real processes: nodes that are alike, and a directory that they do not share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.launch.adopt.ranks import free_port
from tests.launch.namespaces import shape

SECONDS = 300.0
# What each of the nodes of a test is started by.
Prefix = Callable[[int], list[str]]


def inspected(
    place: Path,
    runs: list[Path],
    meet: str,
    prefix: Prefix = lambda node: [],
    *more: str,
    nodes: int | None = None,
) -> tuple[list[int], dict[str, Any], str]:
    """Exit codes, what the first one said, and what was said besides. ``nodes``: if more are awaited than come."""
    started = []
    for node, run in enumerate(runs):
        command = [*prefix(node), sys.executable, "-m", "shoal", "doctor", "--cluster", "--json"]
        words = ["--nodes", str(nodes or len(runs)), "--node-rank", str(node), "--node", f"m{node}"]
        with (place / f"{node}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [*command, *words, "--meet", meet, "--run", str(run), *more],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
    try:
        told = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = "".join(path.read_text() for path in place.glob("*.log"))
    assert told[1:] == [""] * (len(runs) - 1), logs
    return [process.returncode for process in started], json.loads(told[0] or "{}"), logs


@pytest.mark.long
def test_two_nodes_are_compared_and_a_directory_that_is_not_shared_is_named(tmp_path: Path) -> None:
    runs = [tmp_path / "a" / "runs", tmp_path / "b" / "runs"]
    codes, told, logs = inspected(tmp_path, runs, f"127.0.0.1:{free_port()}")
    assert codes == [1, 1] and "Traceback" not in logs, logs
    checks = {check["name"]: check for check in told["checks"]}
    assert [name for name, check in checks.items() if check["status"] == "failed"] == ["shared directory"]
    assert "node m1 does not see" in checks["shared directory"]["detail"]
    assert "--run on a file system that all nodes share" in checks["shared directory"]["fix"]
    assert checks["nodes"]["detail"] == "m0 m1" and checks["versions"]["status"] == "ok"
    assert checks["clocks"]["detail"].startswith("within ") and checks["ports"]["status"] == "ok"
    assert (
        "GB/s" in checks["links between nodes"]["detail"]
        and "2 ranks" in checks["all-reduce of all"]["detail"]
    )
    assert (told["ready"], told["exclude"]) == (False, [])  # of two nodes neither is the wrong one
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_outside_of_a_job_there_is_one_line() -> None:
    for words, said in (
        (["--cluster"], "--cluster: no launcher has started this on the nodes of a job"),
        (["--nodes", "2"], "--nodes is for several machines"),
        (["--cluster", "--nodes", "2", "--node-rank", "2", "--meet", "a:1"], "--node-rank 2 of --nodes 2"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "doctor", *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and done.stdout == ""
        message, advice = done.stderr.splitlines()
        assert message.startswith(f"error: {said}") and advice.startswith("  fix: ")


@pytest.mark.system
def test_the_node_with_the_slow_link_is_named(tmp_path: Path, star: dict[str, str]) -> None:
    """Three machines on one switch; the cable of one carries 100 Mbit/s."""
    names = list(star.values())
    shape(names[2], "100mbit")
    runs = [tmp_path / "runs"] * 3

    def prefix(node: int) -> list[str]:
        return ["ip", "netns", "exec", names[node]]

    codes, told, logs = inspected(tmp_path, runs, "10.79.0.1:29600", prefix)
    checks = {check["name"]: check for check in told["checks"]}
    assert codes == [1, 1, 1] and "Traceback" not in logs, logs
    assert checks["links between nodes"]["status"] == "failed", told["checks"]
    assert checks["links between nodes"]["nodes"] == ["m2"] and told["exclude"] == ["m2"]
    # One that does not come is named; the others are compared all the same.
    codes, told, logs = inspected(tmp_path, runs[:2], "10.79.0.1:29600", prefix, "--wait", "20", nodes=3)
    checks = {check["name"]: check for check in told["checks"]}
    assert codes == [1, 1], logs
    assert "number 2 of 3 did not come" in checks["nodes"]["detail"]
    assert "GB/s" in checks["links between nodes"]["detail"]
