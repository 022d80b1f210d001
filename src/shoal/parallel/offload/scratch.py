"""The scratch directory: where tensors offloaded to NVMe are stored, one directory per run and rank.

Its files are worth nothing after the process: a checkpoint would restore the same. So each directory belongs to a live
process that holds its lock file. The lock goes away with the process, however it ends, and what it leaves behind is
removed at the next start.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.facts.problem import BadInput, Problem

# All of our directories have this prefix; nothing else is ever removed.
PREFIX = "shoal-scratch-"
LOCK = "owner.json"
# File systems in memory: offloading to them would only move the data.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
# Alignment that direct I/O needs for addresses, offsets and sizes, on every disk of today.
BLOCK = 4096
ELSEWHERE = "wait for it, stop it, or another directory: offload.scratch = DIR"
# Another launcher that checks whether a directory is locked holds the lock for a moment.
TRIES, MOMENT = 5, 0.1
# Seconds within which a rank should die after its launcher.
OUTLIVES = 10.0
FIX = "offload.scratch = a directory on a local disk, or leave @nvme out of the layout"


def scratch_problems(
    root: Path, needed: int, made_by_us: bool = False, run: str | None = None
) -> list[Problem]:
    """Everything that keeps a run from using a directory for ``needed`` bytes; creates nothing permanent.

    ``made_by_us``: the run creates the directory if it is missing. ``run``: the run's own name; its ranks may outlive a
    killed launcher by a moment, so wait for them.
    """
    where = "offload.scratch"
    place = _nearest(root) if made_by_us else root
    if not place.is_dir():
        if place.exists():
            return [Problem(f"the scratch directory {root} is no directory", FIX, where)]
        return [Problem(f"the scratch directory {root} does not exist", f"mkdir -p {root}, or {FIX}", where)]
    found = []
    kind = file_system(place)
    if kind in IN_MEMORY:
        found.append(Problem(f"the scratch directory {root} is in memory ({kind})", FIX, where))
    elif (reason := direct_problem(place)) is not None:
        found.append(Problem(f"the scratch directory {root} {reason}", FIX, where))
    deadline = time.monotonic() + OUTLIVES
    while time.monotonic() < deadline and any(owner.get("run") == run for owner in _live(root)):
        time.sleep(MOMENT)
    for owner in _live(root):
        found.append(
            Problem(
                f"the scratch directory {root} is in use by {_in_words(owner)}",
                ELSEWHERE,
                where,
            )
        )
    room = shutil.disk_usage(place).free + (0 if found else sum(_size(left) for left in _left_behind(root)))
    if needed > room:
        found.append(
            Problem(
                f"the scratch directory {root} has room for {_in_units(room)}, "
                f"and this layout keeps {_in_units(needed)} there",
                f"free {_in_units(needed - room)}, a smaller fraction in the layout, or {FIX}",
                where,
            )
        )
    return found


def remove_leftovers(root: Path) -> list[Path]:
    """Remove what runs that ended without cleaning up have left here. Returns the removed paths."""
    left = list(_left_behind(root))
    for one in left:
        shutil.rmtree(one, ignore_errors=True)
    return left


class Scratch:
    """One rank's scratch directory, from creation to removal."""

    def __init__(self, root: Path, run: str, rank: int) -> None:
        """Create it empty, removing what an earlier process of the same rank left."""
        self.path = root / f"{PREFIX}{run}-{rank:05d}"
        for _ in range(TRIES):
            self._lock = self._take_lock()
            if self._is_there():
                break
            os.close(self._lock)
        else:
            raise BadInput(f"another process keeps removing the scratch directory {self.path}", ELSEWHERE)
        for file in self.path.iterdir():
            if file.name != LOCK:
                file.unlink()
        owner = {"run": run, "rank": rank, "process": os.getpid(), "host": socket.gethostname()}
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps(owner).encode(), 0)

    def _take_lock(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadInput(f"cannot make the scratch directory {self.path}: {error.strerror}", FIX) from None
        if not _locked(lock):
            os.close(lock)
            raise BadInput(
                f"the scratch directory {self.path} is in use by {_in_words(_owner(self.path))}", ELSEWHERE
            )
        return lock

    def _is_there(self) -> bool:
        """Whether the lock is that of the directory: a launcher that starts now may have taken a directory without
        a lock for a leftover."""
        try:
            return os.path.samestat(os.fstat(self._lock), (self.path / LOCK).stat())
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove it with all its contents. The lock goes last."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def file_system(path: Path) -> str:
    """The type of file system a directory is on, such as ext4; empty if the kernel does not say."""
    try:
        rows = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    device, best = path.stat().st_dev, ""
    for row in rows:
        before, _, after = row.partition(" - ")
        major, _, minor = before.split()[2].partition(":")
        if os.makedev(int(major), int(minor)) == device:
            best = after.split()[0]
    return best


def direct_problem(place: Path) -> str | None:
    """Why files there cannot bypass the page cache; None if they can."""
    name = place / f".{PREFIX}{os.getpid()}"
    try:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            name.unlink(missing_ok=True)
            return "is on a file system without direct I/O (O_DIRECT)"
        return f"cannot be written to: {error.strerror}"
    os.close(handle)
    name.unlink(missing_ok=True)
    return None


def _ours(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (one for one in sorted(root.glob(f"{PREFIX}*")) if one.is_dir() and not one.is_symlink())


def _left_behind(root: Path) -> Iterator[Path]:
    yield from (one for one in _ours(root) if not _held(one))


def _live(root: Path) -> Iterator[dict[str, Any]]:
    """The live owners, one per run."""
    owners = {str(owner.get("run")): owner for owner in map(_owner, filter(_held, _ours(root)))}
    yield from owners.values()


def _locked(handle: int) -> bool:
    """Take a lock; False if another process holds it for longer than a moment."""
    for _ in range(TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(MOMENT)
        else:
            return True
    return False


def _held(path: Path) -> bool:
    """Whether a live process holds a directory's lock."""
    try:
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _owner(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / LOCK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def _in_words(owner: dict[str, Any]) -> str:
    if not owner:
        return "a live run"
    return f"the run {owner.get('run')} (process {owner.get('process')} on {owner.get('host')})"


def _nearest(path: Path) -> Path:
    """The directory, or its nearest existing parent."""
    return next((one for one in (path, *path.absolute().parents) if one.exists()), path)


def _size(path: Path) -> int:
    total = 0
    with suppress(FileNotFoundError):  # its launcher is removing it
        for file in path.iterdir():
            total += file.stat().st_blocks * 512
    return total


def _in_units(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
