"""Real processes for tests: each is forked from a server that has imported torch once, and joins a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from shoal.launch import local

PRELOAD = [*local.PRELOAD, "tests.ranks"]
SECONDS = 60


def warm() -> None:
    local.warm_workers(PRELOAD)


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(rank, world, *arguments)`` in ``world`` processes of one group; their results in rank order."""
    context = multiprocessing.get_context("forkserver")
    with TemporaryDirectory() as directory:
        pipes = []
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, world, directory, theirs, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = [_receive(pipe) for pipe in pipes]
        for process in processes:
            process.join(SECONDS)
    failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(results) if not fine]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll(SECONDS) else (False, "no answer")
    except EOFError:
        return False, "died"


def _rank(
    rank: int, world: int, directory: str, pipe: Connection, function: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.FileStore(str(Path(directory) / "store"), world)
        if world > 1:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
            )
        answer = (True, function(rank, world, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain bytes: torch's own pickling shares memory with a process that is about to end.
    pipe.send_bytes(pickle.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()
