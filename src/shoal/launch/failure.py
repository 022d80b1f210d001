"""Find the root cause among failures: one rank's own error, not its echoes on peers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from shoal.parallel.signed_store import SignedStore

FATAL = "fatal"
STALLED, STALL = "stalled", "stall"

ERROR, CONNECTION, KILLED, CRASHED, NODE_LOST = "error", "connection", "killed", "crashed", "node lost"


@dataclass(frozen=True)
class Failure:
    """One rank's failure. ``echo``: it only noticed that a peer was gone."""

    rank: int
    message: str
    echo: bool
    time: float
    what: str = "failed"
    kind: str = ERROR
    final: bool = False  # it would recur, so do not restart
    more: dict[str, Any] = field(default_factory=dict)  # for faults.jsonl

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}: {self.message}"


class Death(BaseModel):
    """The end of a rank's process. ``code``: as in Python, negative for a signal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    time: float
    code: int | None = None
    by_us: bool = False  # ended by its launcher or torch's agent: after another's death, or a verdict
    stopped: bool = False  # it was stopped at that time


def tell(store: SignedStore, attempt: SignedStore, rank: int, failure: Failure) -> None:
    """Report a failure as ``rank`` saw it. A failure that would recur also tells later attempts not to try.

    Returns when the store has it. A value that was only sent may still be in flight, over a broken network, when the
    launcher sees the process end and asks why.
    """
    told, key = json.dumps(asdict(failure)), f"failure-{rank}"
    attempt.set(key, told)
    attempt.has(key)
    if failure.final and not store.has(FATAL):
        store.set(FATAL, told)


def cause(store: SignedStore, attempt: SignedStore, world: int, deaths: Sequence[Death] = ()) -> Failure:
    """The failure to blame, in this order: one that would recur; the watchdog's verdict on a stall; the first death by
    a signal; a rank's own error; a later death by a signal; a rank that was stopped; one that died without a message;
    and if all only lost others, their connection.

    ``deaths``: in order. A death that we caused explains nothing, so it is named only if there is nothing else.
    """
    for known in (_read(store, FATAL), _read(attempt, STALLED)):
        if known is not None:
            return known
    every = {rank: _read(attempt, f"failure-{rank}") for rank in range(world)}
    told = {rank: failure for rank, failure in every.items() if failure is not None}
    foreign = [death for death in deaths if not death.by_us]
    killed = [death for death in foreign if (death.code or 0) < 0]
    if killed[:1] == foreign[:1] != []:
        return _killed(killed[0])
    own = [failure for failure in told.values() if not failure.echo]
    if own:
        return min(own, key=lambda failure: failure.time)
    if killed:
        return _killed(killed[0])
    connection = _connection(list(told.values()), world)
    if stopped := sorted(death.rank for death in deaths if death.stopped):
        # Its peers gave up before the watchdog could say why.
        seen = f"; rank {connection.rank} {connection.message}" if connection else ""
        message = f"stopped by a signal or a debugger{seen}"
        return Failure(stopped[0], message, True, time.time(), "stalled", STALL)
    ours = {death.rank for death in deaths if death.by_us}
    silent = [rank for rank in [*(death.rank for death in foreign), *range(world)] if rank not in told]
    silent = [rank for rank in silent if rank not in ours] or (silent if connection is None else [])
    if silent or connection is None:
        first = silent[0] if silent else 0
        return Failure(first, "killed, or crashed without an error message", False, time.time(), kind=CRASHED)
    return connection


def _connection(echoes: Sequence[Failure], world: int) -> Failure | None:
    """The failure reported by ranks that lost each other; None if none reported any."""
    if not echoes:
        return None
    first = min(echoes, key=lambda failure: failure.time)
    others = [str(rank) for rank in range(world) if rank != first.rank]
    lost = f"lost its connection to {'one of ranks' if others[1:] else 'rank'} {', '.join(others)}"
    return Failure(first.rank, f"{lost}: {first.message}", True, first.time, kind=CONNECTION)


def _killed(death: Death) -> Failure:
    name = signal.Signals(-(death.code or 0)).name
    return Failure(death.rank, f"killed by {name}", False, time.time(), kind=KILLED)


def _read(store: SignedStore, key: str) -> Failure | None:
    text = store.read(key)
    return None if text is None else Failure(**json.loads(text))
