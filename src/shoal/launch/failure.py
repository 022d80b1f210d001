"""What went wrong in a worker, told to the launcher: one rank's own error, not the echoes of it in its peers."""

from __future__ import annotations

import errno
import json
import signal
import time
from dataclasses import asdict, dataclass

from torch.distributed import DistBackendError, DistNetworkError, Store

from shoal.facts.problem import BadInput
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.guard.nonfinite import NonFinite

FATAL = "fatal"


@dataclass(frozen=True)
class Failure:
    """One rank's failure. ``echo``: it only noticed that a peer had gone."""

    rank: int
    message: str
    echo: bool
    time: float

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.message}"


def describe(rank: int, error: BaseException) -> Failure:
    """An exception as its reader needs it: plain words where we know the cause, else type and message."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f" ({error.filename})" if error.filename else ""
        fix = "free some space and run the same command again"
        message = f"the disk is full{where}; the last commit is untouched: {fix}"
    elif isinstance(error, (BadInput, Damaged, NonFinite)):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
    return Failure(rank, message, _is_echo(error), time.time())


def _is_echo(error: BaseException) -> bool:
    """Whether a rank failed only because another did. gloo's errors have no type of their own, but a signature."""
    if isinstance(error, (DistBackendError, DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error)
        for sign in ("gloo", "Connection closed by peer", "Connection reset", "Broken pipe", "NCCL")
    )


def tell(store: Store, failure: Failure) -> None:
    """Report a failure. One that is no echo would happen again, so it also tells later attempts not to try."""
    store.set(f"failure-{failure.rank}", json.dumps(asdict(failure)))
    if not failure.echo:
        store.set(FATAL, str(failure.rank))


def first_failure(store: Store, world: int, exit_codes: dict[int, int]) -> Failure:
    """The failure that came first and is no echo; a rank that was killed told nothing, but its exit code does."""
    told = [
        Failure(**json.loads(store.get(f"failure-{rank}")))
        for rank in range(world)
        if store.check([f"failure-{rank}"])
    ]
    own = [failure for failure in told if not failure.echo]
    if own:
        return min(own, key=lambda failure: failure.time)
    for rank, code in exit_codes.items():
        if code < 0:
            return Failure(rank, f"killed by {signal.Signals(-code).name}", False, 0.0)
    if told:
        return min(told, key=lambda failure: failure.time)
    rank, code = next(iter(exit_codes.items()), (0, 1))
    return Failure(rank, f"ended with exit code {code}", False, 0.0)
