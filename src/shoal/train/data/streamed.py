"""Shards of a prepared dataset behind a URL: fetched on demand, a few kept locally.

The manifest, the document ends and the held-out split are local from the start; training shards come and go. Ranks of
one machine share what is fetched. A sample that runs into the next shard needs a few of its tokens, which are read by a
range request: the shard is not fetched for them.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import uuid
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from shoal.facts.input.untrusted_files import parse_json, read_json
from shoal.facts.problem import BadInput
from shoal.train.data.remote import connect, unreachable
from shoal.train.data.shards import answers_file
from shoal.train.files import replace_text

ORIGIN = "origin.json"
MANIFEST = "manifest.json"


class StreamedShards:
    """The shards of one split, as arrays; ``keep`` of them at a time."""

    def __init__(
        self,
        origin: dict[str, Any],
        directory: Path,
        files: Sequence[tuple[str, dict[str, Any]]],
        dtype: np.dtype,
    ) -> None:
        """``files``: each one's name, and its length and hash."""
        self.url, self.keep = str(origin["url"]), int(origin["keep"]) or len(files)
        self.directory, self.files, self.dtype = directory, list(files), dtype
        self.lengths = [int(file["bytes"]) // dtype.itemsize for _, file in files]
        self.fetched: Counter[str] = Counter()  # by this process
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()  # least recently used first
        self._heads: dict[int, np.ndarray] = {}

    def read(self, shard: int, start: int, stop: int, goes_on: bool) -> np.ndarray:
        """Tokens of a shard; ``goes_on``: they complete a sample that began in the previous shard."""
        if goes_on and shard not in self._open:
            return self._head(shard, stop)[start:stop]
        return self._shard(shard)[start:stop]

    def _shard(self, shard: int) -> np.ndarray:
        if shard not in self._open:
            while len(self._open) >= self.keep:
                old, _ = self._open.popitem(last=False)
                # Another rank that still reads it has it mapped.
                (self.directory / self.files[old][0]).unlink(missing_ok=True)
            self._open[shard] = np.memmap(self._fetch(shard), dtype=self.dtype, mode="r")
        self._open.move_to_end(shard)
        return self._open[shard]

    def _head(self, shard: int, count: int) -> np.ndarray:
        if len(self._heads.get(shard, ())) < count:
            files, root = connect(self.url)
            try:
                path = f"{root}/{self.files[shard][0]}"
                content = files.cat_file(path, start=0, end=count * self.dtype.itemsize)
            except Exception as error:
                raise unreachable(self.url, error) from None
            self._heads[shard] = np.frombuffer(content, dtype=self.dtype)
        return self._heads[shard]

    def _fetch(self, shard: int) -> Path:
        """The local file. If several ranks need it at once, one of them fetches it."""
        name, recorded = self.files[shard]
        target = self.directory / name
        with (self.directory / f".{name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target.is_file() and target.stat().st_size == recorded["bytes"]):
                fetch_file(self.url, name, recorded, target)
                self.fetched[name] += 1
        return target


def fetch_file(url: str, name: str, recorded: dict[str, Any] | None, target: Path) -> None:
    """Fetch a file of a prepared dataset, and check its hash before giving it its name."""
    files, root = connect(url)
    aside = target.with_name(f".{name}.{uuid.uuid4().hex}")
    try:
        files.get_file(f"{root}/{name}", str(aside))
        if (
            recorded is not None
            and blake3(max_threads=blake3.AUTO).update_mmap(aside).hexdigest() != recorded["blake3"]
        ):
            raise BadInput(
                f"{name} of {url} is damaged: its content does not match its hash", "prepare it again"
            )
        aside.rename(target)
    except BadInput:
        raise
    except Exception as error:
        raise unreachable(url, error) from None
    finally:
        aside.unlink(missing_ok=True)


def find_streamed(url: str, cache: Path, keep: int) -> Path | None:
    """A local directory for a prepared dataset behind a URL; None if there is none at that URL.

    ``keep``: how many training shards are local at a time; 0: all.
    """
    files, root = connect(url)
    try:
        if not files.isfile(f"{root}/{MANIFEST}"):
            return None
        content = files.cat_file(f"{root}/{MANIFEST}")
    except Exception as error:
        raise unreachable(url, error) from None
    origin = json.dumps({"url": url.rstrip("/"), "keep": keep})
    directory = cache / f"streamed-{blake3(content + origin.encode()).hexdigest()[:24]}"
    if (directory / ORIGIN).is_file():
        return directory
    aside = cache / f".streaming-{uuid.uuid4().hex}"
    aside.mkdir(parents=True)
    try:
        (aside / MANIFEST).write_bytes(content)
        for name, recorded in _at_once(parse_json(content)):
            fetch_file(url, name, recorded, aside / name)
        replace_text(aside / ORIGIN, origin)
        aside.rename(directory)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise BadInput(f"{url} is no data set that shoal data prepare made", "prepare it again") from None
    except OSError:
        if not (directory / ORIGIN).is_file():  # otherwise another launcher was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def read_origin(directory: Path) -> dict[str, Any] | None:
    """Where a directory's shards come from; None if they are local."""
    try:
        found: dict[str, Any] = read_json(directory / ORIGIN)
    except FileNotFoundError:
        return None
    return found


def comes_later(manifest: dict[str, Any]) -> set[str]:
    """The files that need not be local."""
    shards = manifest["splits"]["train"]["shards"]
    return {*shards, *map(answers_file, shards)}


def _at_once(manifest: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    later = comes_later(manifest)
    return [(Path(name).name, recorded) for name, recorded in manifest["files"].items() if name not in later]
