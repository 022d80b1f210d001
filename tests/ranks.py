"""Real processes for tests: each is forked from a server that has imported torch once, and joins a gloo group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.launch import local, ranks
from shoal.parallel.signed_store import SignedStore

# What ranks of tests find imported: they are hundreds of processes, and each would import it again.
PRELOAD = [
    *local.PRELOAD,
    "pytest",
    "hypothesis",
    "shoal.prove.parity_rank",
    "shoal.prove.profile_rank",
    "shoal.prove.calibrate.links",
    "torch.profiler",
    "torch._inductor.pattern_matcher",  # what torch.compile imports on first use, with any backend: a second
    "tests.train.library.small",  # transformers and models of it, which ranks of several tests import
    "tests.ranks",
]
# Long enough for a machine that others use as well: only ranks that wait for each other for good take it.
SECONDS = 600


def warm() -> None:
    local.warm_workers(PRELOAD)


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(rank, world, *arguments)`` in ``world`` processes of one group; their results in rank order."""
    try:
        return ranks.run_ranks(world, _in_group, (function, arguments), SECONDS)
    except ranks.RankFailed as failure:
        raise AssertionError(f"rank {failure.rank}: {failure.text}") from None


def _in_group(
    rank: int, world: int, store: SignedStore, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if world > 1:
        dist.init_process_group(
            "gloo", store=store.plain, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
        )
        # A rank that is done at once closes its sockets: not before all others have connected to it.
        store.plain.set(f"connected/{rank}", b"")
        store.plain.wait([f"connected/{other}" for other in range(world)])
    return function(rank, world, *arguments)
