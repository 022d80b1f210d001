"""What went wrong in a worker, told to the launcher: one rank's own error, not the echoes of it in its peers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import DistError, Store

from shoal.facts.problem import BadInput
from shoal.facts.redact import redact
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.commits import CommitFailed
from shoal.train.files import MAKE_ROOM, disk_is_full, in_words
from shoal.train.guard.agreement import Disagreement
from shoal.train.guard.corruption import Corrupted
from shoal.train.guard.memory import OutOfMemory
from shoal.train.guard.nonfinite import NonFinite

FATAL = "fatal"
STALLED, STALL = "stalled", "stall"

# What kind of failure an error is, and whether it would come again however often the workers are restarted.
KINDS: tuple[tuple[type[BaseException], str, bool], ...] = (
    (BadInput, "input", True),
    (Disagreement, "disagreement", True),
    (NonFinite, "nonfinite", True),
    (CommitFailed, "commit", True),
    (Damaged, "checkpoint", True),
    (Corrupted, "corruption", False),
    (OutOfMemory, "oom", False),
    (MemoryError, "oom", False),
)
ERROR, CONNECTION, KILLED, CRASHED, NODE_LOST = "error", "connection", "killed", "crashed", "node lost"

# Of these the message says it all.
PLAIN = (Corrupted, BadInput, NonFinite, Disagreement, OutOfMemory, CommitFailed, Damaged)


@dataclass(frozen=True)
class Failure:
    """One rank's failure. ``echo``: it only noticed that a peer had gone."""

    rank: int
    message: str
    echo: bool
    time: float
    what: str = "failed"
    kind: str = ERROR
    final: bool = False  # it would come again, so nobody tries again
    more: dict[str, Any] = field(default_factory=dict)  # for faults.jsonl

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}: {self.message}"


def describe(rank: int, error: BaseException) -> Failure:
    """An exception as its reader needs it: plain words where we know the cause, else type and message."""
    kind, final = next(
        ((kind, final) for type, kind, final in KINDS if isinstance(error, type)), (ERROR, False)
    )
    if isinstance(error, OSError) and disk_is_full(error):
        message, kind, final = f"{in_words(error)}; {MAKE_ROOM}", "disk", True
    elif isinstance(error, PLAIN):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
    echo = is_echo(error)
    more: dict[str, Any] = {}
    if isinstance(error, Corrupted):
        rank = error.ranks[0]  # all ranks raise it, and this one is meant
        more = error.row()
    if isinstance(error, OutOfMemory):
        more = {
            "step": error.step,
            "measured": asdict(error.measured),
            "predicted": error.predicted.as_json(),
        }
    kind, final = (CONNECTION, False) if echo else (kind, final)
    return Failure(rank, redact(message), echo, time.time(), kind=kind, final=final, more=more)


def is_echo(error: BaseException) -> bool:
    """Whether a rank failed only because another did. gloo's errors have no type of their own, but a signature."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error)
        for sign in ("gloo", "Connection closed by peer", "Connection reset", "Broken pipe", "NCCL")
    )


def tell(store: Store, attempt: Store, rank: int, failure: Failure) -> None:
    """Report a failure, as ``rank`` has seen it. One that would happen again also tells later attempts not to try."""
    told = json.dumps(asdict(failure))
    attempt.set(f"failure-{rank}", told)
    if failure.final and not store.check([FATAL]):
        store.set(FATAL, told)


def cause(
    store: Store,
    attempt: Store,
    world: int,
    order: Sequence[int] = (),
    exit_codes: Mapping[int, int] | None = None,
) -> Failure:
    """Whose failure it was: what would come again; what the launcher saw of a stall; who died first of a signal; a
    rank's own error; a rank that died without a word; and if all only noticed that others had gone, their connection.

    ``order``: who has ended, the first one first. ``exit_codes`` are theirs.
    """
    if store.check([FATAL]):
        return _read(store, FATAL)
    if attempt.check([STALLED]):
        return _read(attempt, STALLED)
    codes = exit_codes or {}
    told = {rank: _read(attempt, key) for rank in range(world) if attempt.check([key := f"failure-{rank}"])}
    # Who died after the first was ended by us, or by its peers' absence.
    for rank in order[:1]:
        if codes.get(rank, 0) < 0:
            return _killed(rank, codes[rank])
    own = [failure for failure in told.values() if not failure.echo]
    if own:
        return min(own, key=lambda failure: failure.time)
    killed = [
        rank
        for rank in order
        if codes.get(rank, 0) < 0 and -codes[rank] not in (signal.SIGTERM, signal.SIGKILL)
    ]
    if killed:
        return _killed(killed[0], codes[killed[0]])
    silent = [rank for rank in [*order, *range(world)] if rank not in told]
    # Who was ended by SIGTERM or SIGKILL after somebody who has told something was ended by us.
    ours = {rank for rank in order[1:] if codes.get(rank) in (-signal.SIGTERM, -signal.SIGKILL)}
    silent = silent if order and order[0] in silent else [rank for rank in silent if rank not in ours]
    if silent:
        return Failure(silent[0], "killed, or crashed without a word", False, time.time(), kind=CRASHED)
    first = min(told.values(), key=lambda failure: failure.time)
    others = [str(rank) for rank in range(world) if rank != first.rank]
    lost = f"lost its connection to {'one of ranks' if others[1:] else 'rank'} {', '.join(others)}"
    return Failure(first.rank, f"{lost}: {first.message}", True, first.time, kind=CONNECTION)


def _killed(rank: int, code: int) -> Failure:
    return Failure(rank, f"killed by {signal.Signals(-code).name}", False, time.time(), kind=KILLED)


def _read(store: Store, key: str) -> Failure:
    return Failure(**json.loads(store.get(key)))
