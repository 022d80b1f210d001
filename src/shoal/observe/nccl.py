"""NCCL work that was issued but has not finished, from torch's own flight recorder.

On a GPU a rank only enqueues a collective; torch knows whether the device has executed it. One of its threads, which
needs no GIL, dumps this when a named pipe is written to. gloo has neither the pipe nor the information.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REMEMBERED = "2000"


@dataclass(frozen=True)
class Pending:
    """A collective enqueued on a device."""

    group: str  # torch's name of it
    op: str
    number: int  # torch's sequence number
    started: bool  # only known if torch times collectives


def settings(directory: Path) -> dict[str, str]:
    """Environment variables that make torch (2.11 to 2.13) listen for requests and dump to this directory."""
    dump = str(directory / "nccl-")
    return {
        "TORCH_FR_BUFFER_SIZE": REMEMBERED,
        "TORCH_FR_DUMP_TEMP_FILE": dump,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": dump,
    }


def dump_of(directory: Path, rank: int) -> Path:
    return directory / f"nccl-{rank}"


def ask(directory: Path, rank: int) -> bool:
    """Ask a rank to dump its record; False if it does not listen."""
    dump_of(directory, rank).unlink(missing_ok=True)
    try:
        pipe = os.open(directory / f"nccl-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(pipe, b"1")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def pending(dump: Path) -> list[Pending]:
    """Unfinished work when the dump was written, oldest first; empty if it is unreadable."""
    try:
        every = _Plain(io.BytesIO(dump.read_bytes())).load()["entries"]
        # A batch of messages has one entry with its progress, and one for each message with its description.
        batches = {_message(entry) for entry in every if _is_batch(entry)}
        titles = {
            _message(entry): _title(entry) for entry in every if entry["is_p2p"] and not _is_batch(entry)
        }
        return [
            _pending(entry, titles)
            for entry in every
            if not entry["retired"] and entry["state"] != "completed"
            if _is_batch(entry) or not entry["is_p2p"] or _message(entry) not in batches
        ]
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _pending(entry: dict[str, Any], titles: dict[tuple[str, int], str]) -> Pending:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    op = titles.get(_message(entry), _title(entry)) if _is_batch(entry) else _title(entry)
    return Pending(entry["process_group"][0], op, number, entry["state"] == "started")


def _is_batch(entry: dict[str, Any]) -> bool:
    return entry["is_p2p"] and _title(entry) == "coalesced"


def _message(entry: dict[str, Any]) -> tuple[str, int]:
    """torch numbers the message batches of a group."""
    return entry["process_group"][0], entry["p2p_seq_id"]


def _title(entry: dict[str, Any]) -> str:
    """``all_reduce``, or ``send 0->1``."""
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


class _Plain(pickle.Unpickler):
    """Reads torch's pickle but creates only dictionaries, lists and plain values."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a record of collectives")
