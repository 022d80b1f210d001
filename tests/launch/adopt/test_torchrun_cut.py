"""What needs root: plain torchrun on two machines that share no disk, and the cable between them is pulled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Run, Train
from tests.launch.adopt.ranks import Started, steps, wait_for, words
from tests.launch.namespaces import ip, torchrun

from shoal.launch.report import FINISHED, Report
from shoal.train.files import read_rows

pytestmark = pytest.mark.system

STEPS = 120


def faults(run: Path) -> list[dict[str, Any]]:
    return read_rows(run / "faults.jsonl")


def test_the_link_is_cut_and_restored_and_the_curve_continues(
    machines: dict[str, str], settings: Callable[..., list[str]], train: Train, tmp_path: Path
) -> None:
    """Each machine has a run directory of its own; the state is in a store that both reach."""
    options = {"recipe__schedule": "constant", "run__strict": True, "checkpoint__every": 5}
    together = {"recipe__steps": STEPS, "cluster__on": "2xcpu", "fault__timeout": 4}
    values = settings(**options, **together, checkpoint__to=f"file://{tmp_path}/store")
    nodes = []
    try:
        for number, (name, namespace) in enumerate(machines.items()):
            run = tmp_path / name / "run"
            run.parent.mkdir()
            shoal = ["--max-restarts", "3", "-m", "--", "shoal", "train", "--layout", "dp=2", "--run"]
            command = torchrun(number, "10.77.0", 29500, *shoal, str(run), *words(values))
            nodes.append(Started(command, tmp_path / f"{name}.log", {}, ["ip", "netns", "exec", namespace]))
        first = tmp_path / "a" / "run"
        wait_for(lambda: steps(first) >= 12, nodes)
        ip("-n", machines["b"], "link", "set", "eth0", "down")
        wait_for(
            lambda: [row for row in faults(first) if "left to torchrun" in row["action"]],
            nodes,
        )
        stood = steps(first)
        assert stood < STEPS
        ip("-n", machines["b"], "link", "set", "eth0", "up")
        wait_for(lambda: steps(first) > stood + 5, nodes)
        assert [one.code() for one in nodes] == [FINISHED, FINISHED], nodes[0].words() + nodes[1].words()
    finally:
        for one in nodes:
            one.end()
    other = tmp_path / "b" / "run"
    assert (other / "logs" / "rank-00001.log").exists() and not (other / "metrics.jsonl").exists()
    assert not (first / "logs" / "rank-00001.log").exists()
    resumed = [row["resumed_step"] for row in faults(first) if row["kind"] == "restart"]
    assert resumed and resumed[-1] > 0
    found = Run(Report(FINISHED, first, STEPS, "", None, None))
    whole = train("whole", "dp=1", recipe__steps=STEPS, **options)
    assert found.hexes == whole.hexes and found.tensors() == whole.tensors()
