"""What went wrong in a worker, told to the launcher: one rank's own error, not the echoes of it in its peers."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass

from torch.distributed import DistError, Store

from shoal.facts.problem import BadInput
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.commits import CommitFailed
from shoal.train.files import MAKE_ROOM, disk_is_full, in_words
from shoal.train.guard.agreement import Disagreement
from shoal.train.guard.memory import OutOfMemory
from shoal.train.guard.nonfinite import NonFinite

FATAL = "fatal"
STALLED = "stalled"


@dataclass(frozen=True)
class Failure:
    """One rank's failure. ``echo``: it only noticed that a peer had gone."""

    rank: int
    message: str
    echo: bool
    time: float
    what: str = "failed"

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}: {self.message}"


def describe(rank: int, error: BaseException) -> Failure:
    """An exception as its reader needs it: plain words where we know the cause, else type and message."""
    if isinstance(error, OSError) and disk_is_full(error):
        message = f"{in_words(error)}; {MAKE_ROOM}"
    elif isinstance(error, Damaged):
        message = f"{error}\n  fix: remove that checkpoint to continue from the one before it"
    elif isinstance(error, (BadInput, NonFinite, Disagreement, OutOfMemory, CommitFailed)):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
    return Failure(rank, message, is_echo(error), time.time())


def is_echo(error: BaseException) -> bool:
    """Whether a rank failed only because another did. gloo's errors have no type of their own, but a signature."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error)
        for sign in ("gloo", "Connection closed by peer", "Connection reset", "Broken pipe", "NCCL")
    )


def tell(store: Store, attempt: Store, failure: Failure) -> None:
    """Report a failure. One that is no echo would happen again, so it also tells later attempts not to try."""
    told = json.dumps(asdict(failure))
    attempt.set(f"failure-{failure.rank}", told)
    if not failure.echo and not store.check([FATAL]):
        store.set(FATAL, told)


def first_failure(store: Store, attempt: Store, world: int, exit_codes: dict[int, int]) -> Failure:
    """Whose failure it was: one that is no echo; else what the launcher saw of a stall; else a rank that told nothing,
    for it was killed or crashed.

    ``exit_codes`` are those that the agent saw. It names the lowest dead rank, which need not be the first to die.
    """
    if store.check([FATAL]):
        return Failure(**json.loads(store.get(FATAL)))
    if attempt.check([STALLED]):
        return Failure(**json.loads(attempt.get(STALLED)))
    keys = {rank: f"failure-{rank}" for rank in range(world)}
    told = [Failure(**json.loads(attempt.get(key))) for key in keys.values() if attempt.check([key])]
    killed = [rank for rank, code in exit_codes.items() if code < 0]
    silent = killed or [rank for rank in keys if rank not in {failure.rank for failure in told}]
    if silent:
        code = exit_codes.get(silent[0], 0)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else "killed, or crashed without a word"
        return Failure(silent[0], how, False, 0.0)
    return min(told, key=lambda failure: failure.time)
