"""File operations at the start of a run: of the launcher that leads, and of a rank, as the kernel sees them.

Both are Shoal's own code, in processes of their own under ``strace``, which sees every call that names a file, whatever
library makes it. The launcher is ``shoal.launch.nodes.train`` from its first line until it would start its workers,
with as many real followers as there are nodes. The rank is ``shoal.launch.worker.take_part`` with the real loop, from
its first line to the end of one step: a group that carries nothing stands for its peers, and the texts of all ranks are
its own. Before it, the same run was there: every rank has left a log.

Counted are calls about files of the run, its data, its caches and what ranks have in the machine's memory, listings of
folders too. Programs and their libraries are not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

A_NODE = 8  # ranks
SHARED_MEMORY = "/dev/shm/shoal-"
MARK = "/shoal-scale-"  # a file that is not there: what is asked before and after is told apart by it
PROCESSES = 4
TIMEOUT = 60.0
SECONDS = 1500.0
# A call about a name, in a folder that is open or by itself; or about what a folder holds.
NAMED = re.compile(r'^\d+ +\w+\((?:(?:AT_FDCWD|\d+)(?:<([^>]*)>)?, )?"([^"]*)"')
LISTED = re.compile(r"^\d+ +getdents64\(\d+<([^>]*)>")


def file_operations(world: int, folder: Path) -> dict[str, int]:
    """Of a launcher and of the rank that does most, of a run of so many ranks."""
    _prepare(world, folder)
    ranks = sorted({0, world // 2 + 1, world - 1})
    found = [_traced(folder, f"rank({world}, {str(folder)!r}, {rank})") for rank in ranks]
    return {"launcher": _launched(world, folder), "rank": max(found)}


def mark(word: str) -> None:
    Path(MARK + word).exists()


# In processes of their own.


def lead(world: int, folder: str) -> None:
    """The launcher that leads, until it would start its workers."""
    from benchmarks import scale_exchange
    from rich.console import Console

    from shoal.launch.agent import Agent
    from shoal.launch.nodes import train
    from shoal.launch.nodes.count import NodeCount
    from shoal.train.run_directory import RunDirectory

    def started(*_: object) -> None:
        mark("end")
        os._exit(0)

    Agent._start_workers = started  # type: ignore[method-assign, assignment]
    # Those of the followers, who have no config of their own.
    train._Together._facts = lambda self: scale_exchange.status(0).facts  # type: ignore[method-assign]
    nodes = max(1, world // A_NODE)
    job = _job(world, Path(folder))
    mark("begin")
    run = RunDirectory(Path(folder) / "run", "node-0")
    train.train(job, run, NodeCount(nodes, nodes), False, Console(stderr=True))


def rank(world: int, folder: str, number: int) -> None:
    """One rank, until it has done a step."""
    import torch.distributed as dist

    from shoal.launch import worker
    from shoal.launch.assignment import Assignment
    from shoal.parallel.hosts import HostGroup
    from shoal.parallel.mesh import Mesh
    from shoal.parallel.signed_store import SignedStore, new_secret
    from shoal.train.run_directory import RunDirectory

    job, nodes = _job(world, Path(folder)), max(1, world // A_NODE)
    (dataset,) = (Path(folder) / "dataset").read_text().splitlines()
    assignment = Assignment("", job, Path(folder) / "run", Path(dataset), b"", "0a0a0a0a-1", nodes=nodes)

    def alone(job: Any, rank: int, local_rank: int, store: SignedStore, *_: object) -> Mesh:
        if world > 1:
            dist.init_process_group("fake", rank=rank, world_size=world)
        import torch

        return Mesh(job.layout, rank, torch.device("cpu"), store, timedelta(60), "gloo", nodes)

    worker.init_rank = alone  # type: ignore[assignment]
    HostGroup.gather = lambda self, text: [text] * world if self.rank == 0 else []  # type: ignore[method-assign]
    HostGroup.broadcast = lambda self, text: text  # type: ignore[method-assign]
    HostGroup.wait = lambda self, key: None  # type: ignore[method-assign]
    mark("begin")
    run = RunDirectory(assignment.run, "node-0")
    run.keep_in(job.config.checkpoint.to)
    log = os.dup(1), os.dup(2)
    worker.print_to(run.log(number))
    store = SignedStore(dist.HashStore(), new_secret())
    worker.take_part(assignment, run, number, number % A_NODE, store, bool, 0)
    os.dup2(log[0], 1), os.dup2(log[1], 2)
    mark("end")


def follow(world: int, folder: str, first: int, count: int) -> None:
    """So many of the launchers that follow."""
    from benchmarks import scale_exchange

    from shoal.launch.nodes.exchange import Follower
    from shoal.launch.nodes.meeting import MeetingPoint
    from shoal.launch.nodes.relay import RelayLink
    from shoal.launch.rendezvous import connect

    RelayLink.start = lambda self: None  # type: ignore[method-assign]
    deadline = time.monotonic() + SECONDS
    while (place := MeetingPoint.read(Path(folder) / "run")) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert place is not None
    followers = []
    for node in range(first, first + count):
        status = scale_exchange.status(node).model_copy(update={"ready": 1})
        store = connect(place.port, bytes.fromhex(place.secret), TIMEOUT)
        followers.append(Follower(store, status, SECONDS))
        followers[-1].turn()
    while time.monotonic() < deadline and not all(one.broken for one in followers):
        for one in followers:
            if not one.broken:
                one.turn()
        time.sleep(0.5)


# From outside.


def _prepare(world: int, folder: Path) -> None:
    """The data, and what an earlier start of the run has left."""
    from rich.console import Console

    from shoal.launch import local
    from shoal.launch.manifest import describe_plan, describe_run
    from shoal.train.run_directory import RunDirectory, identity

    (folder / "text.jsonl").write_text('{"text": "the shoal turns as one"}\n' * 4000)
    job = _job(world, folder)
    data = local.tokenised(job, Console(stderr=True))
    (folder / "dataset").write_text(f"{data.path}\n")
    run = RunDirectory(folder / "run", "node-0")
    run.path.mkdir(mode=0o700)
    start = {
        **describe_run(job, data.path),
        "id": f"{world:016x}",
        "identity": identity(job, data.fingerprint),
    }
    run.write_start(job, start, describe_plan(job))
    for number in range(world):
        run.log(number).write_text("as it began\n")


def _job(world: int, folder: Path) -> Any:
    from shoal.facts.config.file import load
    from shoal.plan.resolve import resolve

    nodes = max(1, world // A_NODE)
    values = {
        "model.preset": "tiny",
        "data.source": folder / "text.jsonl",
        "data.cache": folder / "cache",
        "recipe.seq": 32,
        "recipe.batch": world,
        "recipe.steps": 1,
        "evaluate.every": 0,
        "checkpoint.every": 0,
        "cluster.on": f"{nodes}x{A_NODE}xcpu" if nodes > 1 else f"{world}xcpu",
    }
    return resolve(load(None, [f"{name}={value}" for name, value in values.items()], f"dp={world}").config)


def _launched(world: int, folder: Path) -> int:
    nodes, started = max(1, world // A_NODE), []
    share = -(-(nodes - 1) // PROCESSES)
    for first in range(1, nodes, share or 1):
        call = f"follow({world}, {str(folder)!r}, {first}, {min(share, nodes - first)})"
        started.append(subprocess.Popen(_python(call), cwd=ROOT))
    try:
        return _traced(folder, f"lead({world}, {str(folder)!r})")
    finally:
        for process in started:
            process.kill()
            process.wait()


def _traced(folder: Path, call: str) -> int:
    """How many operations on files of the run a call makes."""
    seen = folder / "calls"
    told = ["-qq", "-y", "-s", "4096", "-e", "trace=%file,getdents64", "-o", str(seen)]
    tracer = ["strace", "-f", "--seccomp-bpf", *told]
    environment = {**os.environ, "SHOAL_CACHE": str(folder / "shoal"), "OMP_NUM_THREADS": "1"}
    subprocess.run([*tracer, *_python(call)], cwd=ROOT, env=environment, check=True, timeout=SECONDS)
    inside, found = False, []
    for path in _paths(seen):
        if path.startswith(MARK):
            inside = path == f"{MARK}begin"
        elif inside and path.startswith((f"{folder}/", SHARED_MEMORY)):
            found.append(path)
    assert found, f"{call}: nothing was seen"
    return len(found)


def _paths(seen: Path) -> Iterator[str]:
    """What each call is about."""
    for line in seen.open(errors="replace"):
        if (named := NAMED.match(line)) is not None:
            yield os.path.normpath(Path(named[1] or "", named[2]))
        elif (listed := LISTED.match(line)) is not None:
            yield listed[1]


def _python(call: str) -> list[str]:
    code = f"from benchmarks.scale_start import follow, lead, rank; {call}"
    return [sys.executable, "-c", code]
