"""One rank of a peer: joins the others, then runs the peer's own loop until the benchmark ends it."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.launch.init_rank import init_rank
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup


@dataclass(frozen=True)
class PeerRequest:
    """Which peer to run, on what, and where its files go."""

    job: Job
    module: str  # in ``peers``
    compiled: bool
    dataset: Path
    directory: Path


def take_part(
    rank: int, world: int, store: SignedStore, request: PeerRequest, pipes: list[Connection]
) -> None:
    """A peer's process on this rank. Its output goes to a file: standard output may carry a JSON document."""
    _print_to(request.directory / f"rank-{rank}.log")
    # torchrun's variables, for stacks that expect them.
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    if world > 1:
        os.environ.update({name: str(value) for name, value in told.items()})
    mesh = init_rank(request.job, rank, rank, store)
    setup = PeerSetup(request.job, mesh, request.dataset, request.directory, request.compiled)
    peer = importlib.import_module(f"shoal.prove.bench.peers.{request.module}")
    peer.train(setup, Journal(pipes[rank], mesh.device))


def _print_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
