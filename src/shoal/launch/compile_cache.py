"""Where compiled code is kept between runs and restarts, and how many processes of a rank compile.

A later run loads and executes this code, so it is kept in a directory that no other user can write to. Torch's default
is a directory in /tmp with a predictable name, which anyone could create first.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from shoal.facts.calibration.file import cache_folder
from shoal.facts.cluster.this_machine import usable_threads

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
# A block has some dozens of kernels; more processes than this wait for the largest one.
MOST_PROCESSES = 8


def use_compile_cache(ranks: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Configure this process, one of ``ranks`` on this machine. The user's own settings take precedence."""
    if not _chosen(environment.get(FOLDER)):
        environment[FOLDER] = str(private_folder(cache_folder(environment) / "compiled"))
    _move_headers(Path(environment[FOLDER]) / "precompiled_headers")
    if not environment.get(THREADS):
        # Torch read the variable when it was imported, in the server that ranks are forked from.
        import torch._inductor.config

        torch._inductor.config.compile_threads = max(1, min(MOST_PROCESSES, usable_threads() // ranks))


def _chosen(folder: str | None) -> bool:
    """Whether the user chose the directory. On import torch sets the variable too, to its directory in /tmp."""
    if not folder:
        return False
    path = Path(folder)
    return not (path.name.startswith("torchinductor_") and path.parent == Path(tempfile.gettempdir()))


def _move_headers(folder: Path) -> None:
    """Move C++ headers, which are compiled once for all kernels, out of the /tmp directory that torch always uses for
    them.

    Their location is private to torch (2.13); if they cannot be moved they are not kept.
    """
    from torch._inductor import codecache, config

    if hasattr(codecache, "_HEADER_DIR") and hasattr(codecache, "_HEADER_LOCK_DIR"):
        codecache._HEADER_DIR = str(folder)
        codecache._HEADER_LOCK_DIR = str(folder / "locks")
    elif hasattr(config, "cpp_cache_precompile_headers"):
        config.cpp_cache_precompile_headers = False


def private_folder(wanted: Path) -> Path:
    """The wanted directory if it is ours alone, created now or found; otherwise a new one, which later runs will not
    find.
    """
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = wanted.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        reason = "others can use it (chmod 700 it, or remove it)"
    except OSError as error:
        ours, reason = False, str(error.strerror or error)
    if ours:
        return wanted
    print(f"compiled code is not kept for later runs: {wanted}: {reason}", flush=True)
    return Path(tempfile.mkdtemp(prefix="shoal-compiled-"))
