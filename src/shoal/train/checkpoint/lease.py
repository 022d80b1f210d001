"""The lock of a run whose state is in an object store: a note there that its holder renews. Needs no torch.

A store has no lock that ends with its holder. So the holder keeps incrementing a counter in the note; another process
that sees it stand still for long enough takes over. No clocks are compared, because those of two machines may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.facts.problem import BadInput
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.files import replace_text
from shoal.train.guard.processes import is_gone, process_space, started

LOCK = "lock.json"
# Names the run's directory. Its own lock is held, so an old note with the same name belongs to a dead process.
DIRECTORY = ".holder"
RENEW_SECONDS, LAPSE_SECONDS = 5.0, 20.0
LOOK_SECONDS = 1.0


@contextlib.contextmanager
def leased(
    store: ObjectStore, run: Path, say: Callable[[str], None], lost: Callable[[], None]
) -> Iterator[None]:
    """Hold the lock on the store for the run in this directory, whose own lock is held. ``lost`` is called if
    another process has taken it.
    """
    mine = {"holder": secrets.token_hex(8), "directory": _name_of(run), **_this_process()}
    _wait_until_free(store, mine, say)
    _renew(store, mine, 0)
    over = threading.Event()

    def renew() -> None:
        beat = 0
        while not over.wait(RENEW_SECONDS):
            beat += 1
            with contextlib.suppress(OSError):  # a store that does not respond now may later
                found = _read(store)
                if found and found.get("holder") != mine["holder"]:
                    say(f"{store.url} is held by another run now ({_whose(found)}): stopping")
                    lost()
                    return
                _renew(store, mine, beat)

    thread = threading.Thread(target=renew, name="shoal-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(RENEW_SECONDS)
        with contextlib.suppress(OSError):
            if _read(store).get("holder") == mine["holder"]:
                store.take_away(LOCK)


def _wait_until_free(store: ObjectStore, mine: dict[str, Any], say: Callable[[str], None]) -> None:
    first = found = _read(store)
    if not first or _is_over(first, mine):
        return
    say(f"{store.url} was held by {_whose(first)}: looking for {LAPSE_SECONDS:.0f} s whether it is alive")
    deadline = time.monotonic() + LAPSE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        found = _read(store)
        if not found:
            return
        if found != first:
            raise BadInput(
                f"{store.url} is in use by a live run: {_whose(found)}",
                "wait for it, stop it, or choose another name with --run DIR",
            )


def _is_over(found: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether the holder is known to be dead."""
    if found.get("directory") == mine["directory"]:
        return True
    here = all(found.get(key) == mine[key] for key in ("host", "space"))
    process = found.get("process")
    if not here or not isinstance(process, int):
        return False
    return is_gone(process) or started(process) != found.get("started")


def _this_process() -> dict[str, Any]:
    own = os.getpid()
    return {"host": socket.gethostname(), "process": own, "space": process_space(), "started": started(own)}


def _name_of(run: Path) -> str:
    place = run / DIRECTORY
    with contextlib.suppress(OSError):
        if name := place.read_text(encoding="utf-8").strip():
            return name
    name = secrets.token_hex(8)
    replace_text(place, name + "\n")
    return name


def _read(store: ObjectStore) -> dict[str, Any]:
    try:
        found = json.loads(store.left(LOCK) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _renew(store: ObjectStore, mine: dict[str, Any], beat: int) -> None:
    store.leave(LOCK, json.dumps({**mine, "beat": beat}))


def _whose(found: dict[str, Any]) -> str:
    return f"process {found.get('process')} on {found.get('host')}"
