"""Jobs of a real Ray, two nodes on this machine: a node is removed, another comes, and the run stays the same."""

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

from shoal.launch.report import STOPPED, Report
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

pytestmark = pytest.mark.system
SECONDS = 900.0
NODE = {"num_cpus": 2, "object_store_memory": 100_000_000}
OPTIONS: dict[str, Any] = {"recipe__schedule": "constant", "checkpoint__every": 100_000, "run__strict": True}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and a node; each has two cores."""
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[system]'")
    import ray
    from ray.cluster_utils import Cluster

    made: Any = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def shoal(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words], capture_output=True, text=True, timeout=SECONDS
    )


def sets(values: list[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


class RayRun:
    """A run that is trained as a job of Ray."""

    def __init__(self, path: Path, address: str, values: list[str]) -> None:
        self.run, self.path = RunDirectory(path), str(path)
        words = ["--to", "ray", "--address", address, "--run", self.path, "--layout", "dp=2,fsdp=2"]
        self.words = ["launch", *words, *sets(values)]

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run.metrics)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            log = self.run.path / "job" / "ray.log"
            said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            assert time.monotonic() < deadline, f"{what} did not happen\n{said}"
            time.sleep(0.1)

    def wait_for_world(self, world: int, steps: int) -> None:
        """So many steps on so many ranks, from now."""
        begin = len(self.rows())
        self.wait(
            lambda: sum(row["world"] == world for row in self.rows()[begin:]) >= steps, f"a world of {world}"
        )


def test_a_node_is_removed_and_the_run_goes_on_without_and_then_with_another(
    cluster: Any, settings: Callable[..., list[str]], train: Train, tmp_path: Path
) -> None:
    together = {"recipe__steps": 90_000, "cluster__on": "2x2xcpu", "cluster__interface": "lo"}
    values = settings(**OPTIONS, **together, checkpoint__memory=1, fault__timeout=5)
    job = RayRun(tmp_path / "run", cluster.address, values)
    # One node of two: said before anything is taken or written.
    done = shoal(*job.words, "--submit")
    assert done.returncode == 2 and not job.run.path.exists()
    message, advice = done.stderr.splitlines()
    assert message.startswith("error: 2 nodes with 2 CPU are needed; Ray has 1 of 1 nodes")
    assert advice.startswith("  fix: ")

    second = cluster.add_node(**NODE)
    done = shoal(*job.words, "--nodes", "1:2", "--submit", "--no-follow")
    assert done.returncode == 0, done.stderr
    job.wait_for_world(4, 5)
    cluster.remove_node(second, allow_graceful=False)
    job.wait_for_world(2, 3)
    cluster.add_node(**NODE)
    job.wait_for_world(4, 3)
    assert json.loads(shoal("status", job.path, "--json").stdout)["state"] == "running"
    assert shoal("cancel", job.path).returncode == 0
    job.wait(lambda: (job.run.path / "job" / "exit").exists(), "the end of the job")
    found = json.loads(shoal("status", job.path, "--json").stdout)
    assert (found["state"], found["exit_code"]) == ("cancelled", STOPPED)
    assert "is lost" in shoal("logs", job.path).stdout
    step = job.rows()[-1]["step"]
    assert job.run.step() == step
    ended = Run(Report(STOPPED, job.run.path, step, "", None, None))
    whole = train("whole", "dp=1", recipe__steps=step, **OPTIONS)
    assert ended.hexes == whole.hexes and ended.tensors() == whole.tensors()


LOOP = """
import json, sys
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from shoal.launch.jobs.ray_loop import train_loop
import ray

given = json.loads(sys.argv[1])
ray.init(address=given["address"], log_to_driver=False)
TorchTrainer(
    train_loop,
    train_loop_config=given["loop"],
    scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"),
    run_config=RunConfig(storage_path=given["storage"], failure_config=FailureConfig(max_failures=2)),
).fit()
"""


def test_a_run_is_the_loop_of_a_torch_trainer(
    cluster: Any, settings: Callable[..., list[str]], train: Train, tmp_path: Path
) -> None:
    cluster.add_node(**NODE)
    values = settings(**OPTIONS, recipe__steps=6, cluster__on="2x2xcpu", cluster__interface="lo")
    run = tmp_path / "run"
    loop = {"run": str(run), "set": values, "layout": "dp=2,fsdp=2"}
    given = {"address": cluster.address, "loop": loop, "storage": str(tmp_path / "ray")}
    words = [sys.executable, "-c", LOOP, json.dumps(given)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    logs = "".join(path.read_text() for path in tmp_path.glob("run.*.log"))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    found = Run(Report(0, run, 6, "", None, None))
    whole = train("whole", "dp=1", recipe__steps=6, **OPTIONS)
    assert found.hexes == whole.hexes and found.tensors() == whole.tensors()
