"""Join the ranks that a launcher started, or run alone: for a script with its own loop."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from shoal.launch.adopt.launched_rank import told
from shoal.parallel import device_context
from shoal.parallel.signed_store import SECRET_BYTES, SignedStore, new_secret
from shoal.train.library.run import JoinedRanks

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
# A script may have several runs in sequence, which use the same store: each has its own keys.
_RUNS = count()


def join_ranks(device: str | torch.device | None, timeout: float) -> JoinedRanks:
    """This process as a rank: of a group that the script made, of a launcher's, or of one."""
    patience, number = timedelta(seconds=timeout), next(_RUNS)
    if dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", str(dist.get_rank())))
        here = _device(device, local)
        rank, world = dist.get_rank(), dist.get_world_size()
        nodes = max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
        # Created by the script, which keeps using it.
        signed = _signed(rank, world, dist.PrefixStore(f"run-{number}", _its_store()), timeout)
        return JoinedRanks(rank, world, here, signed, nodes, lambda: None)
    found = told()
    here = _device(device, found.local_rank if found else 0)
    if found is None or found.world == 1:
        return JoinedRanks(0, 1, here, None, 1, lambda: None)
    store = dist.TCPStore(
        found.host,
        found.port,
        found.world,
        is_master=found.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=patience,
        multi_tenant=True,
    )
    # After a restart the same store still has the last attempt's keys.
    own = dist.PrefixStore(f"shoal-{os.environ.get(ATTEMPT, '0')}-{number}", store)
    backend = "nccl" if here.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=own, rank=found.rank, world_size=found.world, timeout=patience)
    signed = _signed(found.rank, found.world, own, timeout)
    return JoinedRanks(found.rank, found.world, here, signed, found.nodes, dist.destroy_process_group)


def _device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    if wanted is None and torch.cuda.is_available():
        wanted = torch.device("cuda", local_rank % torch.cuda.device_count())
    device = torch.device(wanted or "cpu")
    if device.type == "cuda":
        device = torch.device(
            "cuda", local_rank % torch.cuda.device_count() if device.index is None else device.index
        )
        device_context.take(device)
    return device


def _its_store() -> dist.Store:
    """The store of a process group that the script made. Torch has no public name for it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def _signed(rank: int, world: int, store: dist.Store, timeout: float) -> SignedStore | None:
    """A signed store for the ranks, under a secret that the first rank broadcasts through the group."""
    if world == 1:
        return None
    drawn = list(new_secret()) if rank == 0 else [0] * SECRET_BYTES
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    secret = torch.tensor(drawn, dtype=torch.uint8, device=device)
    dist.broadcast(secret, 0)
    return SignedStore(dist.PrefixStore("shoal-library", store), bytes(secret.tolist()), timeout)
