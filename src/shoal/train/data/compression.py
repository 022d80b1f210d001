"""Compressed source files: recognised by extension, read sequentially from the start."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any, cast

from shoal.facts.problem import BadInput

READ_AT_ONCE = 1 << 16
ENDINGS = (".gz", ".zst", ".bz2", ".xz")


class DamagedStream(Exception):
    """A stream that its reader cannot decode."""


# What readers raise for a damaged file.
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, DamagedStream)


def ending(name: str) -> str:
    """The extension that names a file's compression; empty if it is not compressed."""
    return next((end for end in ENDINGS if name.lower().endswith(end)), "")


def open_compressed(path: Path, end: str) -> IO[bytes]:
    if end == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if end == ".bz2":
        return cast(IO[bytes], bz2.open(path))
    if end == ".xz":
        return cast(IO[bytes], lzma.open(path))
    return cast(IO[bytes], io.BufferedReader(_Zstandard(path)))


def check_readable(end: str, name: str) -> None:
    """Refuse a format whose package is not installed."""
    if end == ".zst":
        try:
            import zstandard  # noqa: F401
        except ImportError:
            raise BadInput(
                f"reading {name!r} needs the zstandard package", "pip install zstandard, or unpack the files"
            ) from None


class _Zstandard(io.RawIOBase):
    """A file of one or more Zstandard frames. The package's own reader does not notice a truncated frame."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._error, self._frame = zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj
        self._file = path.open("rb")
        self._open: Any = None  # the frame being read
        self._packed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            if not self._packed and not (packed := self._file.read(READ_AT_ONCE)):
                if self._open is not None:
                    raise DamagedStream("it ends before its last frame does")
                return 0
            self._packed = self._packed or packed
            self._open = self._open or self._frame()
            try:
                self._ready = self._open.decompress(self._packed)
            except self._error as error:
                raise DamagedStream(str(error)) from None
            self._packed = self._open.unused_data if self._open.eof else b""
            self._open = None if self._open.eof else self._open
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
