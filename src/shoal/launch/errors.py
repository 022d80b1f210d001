"""Classify a worker's exception as a kind of failure, in plain words where possible."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError

from shoal.facts.problem import BadInput
from shoal.facts.redact import redact
from shoal.launch.failure import CONNECTION, ERROR, Failure
from shoal.parallel.offload.direct_files import ScratchDamaged
from shoal.parallel.signed_store import Tampered
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.commits import CommitFailed
from shoal.train.files import MAKE_ROOM, disk_is_full, in_words
from shoal.train.guard.agreement import Disagreement
from shoal.train.guard.corruption import Corrupted
from shoal.train.guard.nonfinite import NonFinite
from shoal.train.guard.out_of_memory import OutOfMemory

# Exception types with their kind of failure, and whether it would recur however often workers are restarted.
KINDS: tuple[tuple[type[BaseException], str, bool], ...] = (
    (BadInput, "input", True),
    (Disagreement, "disagreement", True),
    (NonFinite, "nonfinite", True),
    (CommitFailed, "commit", True),
    (Damaged, "checkpoint", True),
    (Corrupted, "corruption", False),
    (Tampered, "tampered", False),
    (OutOfMemory, "oom", False),
    (MemoryError, "oom", False),
    (ScratchDamaged, "disk", False),
)

# Exceptions whose message needs no type in front.
PLAIN = (
    Corrupted,
    BadInput,
    NonFinite,
    Disagreement,
    OutOfMemory,
    CommitFailed,
    Damaged,
    Tampered,
    ScratchDamaged,
)


def describe(rank: int, error: BaseException) -> Failure:
    """Describe an exception for its reader: plain words if we know the cause, otherwise type and message."""
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
        rank = error.ranks[0]  # all ranks raise it; this is the one at fault
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
    """Whether a rank failed only because another did. gloo's errors have no type of their own, but a recognisable
    text.
    """
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error)
        for sign in ("gloo", "Connection closed by peer", "Connection reset", "Broken pipe", "NCCL")
    )
