"""``train_loop``: a Shoal run as the loop of Ray Train's ``TorchTrainer``.

    TorchTrainer(
        train_loop,
        train_loop_config={"config": "my-run.toml", "run": "/shared/my-run", "set": ["recipe.steps=1000"]},
        scaling_config=ScalingConfig(num_workers=16, use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    ).fit()

Ray Train holds one worker per device. The first worker of each node runs the node's launcher, which starts one rank per
device; the others only hold theirs. TorchTrainer restarts lost workers, and the run resumes from its last commit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput, did_you_mean
from shoal.launch.report import FINISHED
from shoal.plan.resolve import resolve

# Variables for Ray Train's own workers, which a launcher is not.
OF_WORKERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
SETTINGS = ("config", "run", "set", "layout")


def train_loop(settings: dict[str, Any]) -> None:
    """``settings``: arguments of ``shoal train``: config, run (visible to all nodes), set, layout."""
    from ray import train

    if unknown := settings.keys() - set(SETTINGS):
        raise BadInput(f"train_loop has no {min(unknown)!r}", did_you_mean(min(unknown), SETTINGS))
    if "run" not in settings:
        raise BadInput("train_loop_config names no run directory", '"run": "/shared/my-run"')
    here = train.get_context()
    world, local_world = here.get_world_size(), here.get_local_world_size()
    if world % local_world:
        raise BadInput(f"{world} workers are not as many on each node", "num_workers: a multiple of a node's")
    nodes = world // local_world
    _check_world(settings, world, nodes)
    if here.get_local_rank() != 0:
        return
    words = ["--run", str(settings["run"]), "--nodes", str(nodes), "--node", f"train-{here.get_node_rank()}"]
    words += [word for one in settings.get("set", ()) for word in ("--set", one)]
    words += ["--layout", settings["layout"]] if "layout" in settings else []
    words += [str(settings["config"])] if "config" in settings else []
    code, last = _launch(words, Path(settings["run"]).with_suffix(f".{here.get_node_rank()}.log"))
    if code != FINISHED:
        # TorchTrainer restarts all workers, as often as its FailureConfig allows.
        raise RuntimeError(f"shoal train exited with {code}: {last}")


def _check_world(settings: dict[str, Any], world: int, nodes: int) -> None:
    """Checked by every worker before any of them starts a launcher."""
    config = settings.get("config")
    loaded = load(Path(config) if config else None, list(settings.get("set", ())), settings.get("layout"))
    layout = resolve(loaded.config, os.environ.get("CUDA_VISIBLE_DEVICES"), nodes).layout
    if layout.world != world:
        raise BadInput(
            f"layout {layout} has {layout.world} ranks, and TorchTrainer {world} workers", "as many"
        )


def _launch(words: list[str], log: Path) -> tuple[int, str]:
    """Run a launcher, which ends with this process; returns its exit code and last line."""
    tied = [sys.executable, "-m", "shoal.launch.jobs.tied", str(os.getpid()), sys.executable, "-m", "shoal"]
    mine = {name: value for name, value in os.environ.items() if name not in OF_WORKERS}
    with log.open("ab") as file:
        code = subprocess.run(
            [*tied, "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=mine,
            start_new_session=True,
        ).returncode
    lines = log.read_text(errors="replace").splitlines()
    return code, lines[-1] if lines else ""
