"""Ray: a background driver holds a placement group, one bundle per node, with a launcher in each.

A node's launcher starts one worker per device, as everywhere. The driver is a process of this machine, so it is
submitted, watched and cancelled like a local job.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from typing import Any

from shoal.facts.problem import BadInput, first_line
from shoal.launch.jobs.job import LaunchJob
from shoal.launch.jobs.local import background, by_hand, cancel, log_file, logs, status, submit

__all__ = ["by_hand", "cancel", "check", "connect", "log_file", "logs", "status", "submit", "write"]

SCRIPT, JOB_FILE = "job.sh", "ray.json"
DRIVER = "shoal.launch.jobs.ray_driver"
CONNECT_SECONDS = 30


def write(job: LaunchJob) -> dict[str, str]:
    words = [sys.executable, "-m", DRIVER, str(job.folder / JOB_FILE)]
    return {SCRIPT: background(job, words), JOB_FILE: job.model_dump_json(indent=2) + "\n"}


def bundle(job: LaunchJob) -> dict[str, float]:
    """What a node's launcher reserves: a device per rank, and cores."""
    if not job.on_gpus:
        return {"CPU": float(job.cpus or job.devices)}
    return {"GPU": float(job.devices), "CPU": float(job.cpus or 1)}


def connect(job: LaunchJob) -> Any:
    """Ray's module, connected to its cluster."""
    if find_spec("ray") is None:
        raise BadInput("Ray is not installed here", "pip install 'shoal[ray]'")
    import ray

    try:
        ray.init(
            address=job.address or "auto",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = job.address or "RAY_ADDRESS, or on this machine"
        raise BadInput(
            f"no Ray cluster at {where}: {first_line(error)}", "--address HOST:PORT of its head"
        ) from None
    return ray


# Ray's names of a node, any of which --exclude accepts; and the digits of its id that a log shows.
CALLED, DIGITS = ("NodeName", "NodeManagerHostname", "NodeManagerAddress"), 8


def excluded(ray: Any, job: LaunchJob) -> list[str]:
    """Ids of nodes that the job must not use."""
    there = [node for node in ray.nodes() if node["Alive"]]
    found = []
    for name in filter(None, (job.exclude or "").split(",")):
        mine = [
            node["NodeID"]
            for node in there
            if name in (node.get(called) for called in CALLED)
            or (len(name) >= DIGITS and node["NodeID"].startswith(name))
        ]
        if not mine:
            names = ", ".join(sorted(f"{node['NodeName']} ({node['NodeID'][:DIGITS]})" for node in there))
            raise BadInput(f"--exclude {name}: Ray has no such node", f"those it has: {names}")
        found += mine
    return found


def check(job: LaunchJob) -> str:
    """Check that the cluster has enough nodes of that size. If they are busy, the job waits."""
    ray = connect(job)
    try:
        out = excluded(ray, job)
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in out]
    finally:
        ray.shutdown()
    wanted = bundle(job)
    fit = [one for one in alive if all(one.get(name, 0) >= amount for name, amount in wanted.items())]
    if len(fit) < job.count.most:
        each = " and ".join(f"{amount:g} {name}" for name, amount in wanted.items())
        total = {name: sum(one.get(name, 0) for one in alive) for name in wanted}
        there = " and ".join(f"{amount:g} {name}" for name, amount in total.items())
        raise BadInput(
            f"{job.count.most} nodes with {each} are needed; Ray has {len(fit)} of {len(alive)} nodes (in all {there})",
            "a layout or cluster.on for what there is, or more nodes",
        )
    return f"Ray has {len(fit)} nodes that fit"
