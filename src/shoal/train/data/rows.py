"""Rows: source files cut into pieces that can be read apart, and the documents or faults in each."""

from __future__ import annotations

import gzip
import json
import mmap
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.facts.problem import BadInput
from shoal.train.data.sources import SourceFile

# A piece is about this many bytes. It decides where a long text is cut, hence (rarely) tokens: a change
# needs a new format version.
PIECE_BYTES = 4 << 20
SHOWN = 200  # characters of a bad row that are kept to recognise it

# A long text is cut after a line end between two visible characters: common tokenizers never join tokens
# across that place. A file without one stays whole.
TEXT_CUT = re.compile(rb"[^\s]\r?\n(?=[^\s])")
LINE_CUT = re.compile(rb"\n")


@dataclass(frozen=True)
class Piece:
    """A range of bytes of one file. A compressed file is one piece: it can only be read from its start."""

    file: SourceFile
    start: int
    stop: int

    @property
    def closes(self) -> bool:
        """Whether a text's document ends here, and not in a later piece."""
        return self.stop == self.file.size


@dataclass(frozen=True)
class Row:
    """One line or one text: a document, or the reason why it is none. Blank lines have neither."""

    text: str | None
    reason: str = ""
    shown: str = ""
    lines: int = 1  # line ends it spans, from which the numbers of later lines follow


def cut(file: SourceFile) -> Iterator[Piece]:
    """The pieces of a file, in order. They depend on its content alone, not on who will read them."""
    if file.compressed or file.size <= PIECE_BYTES:
        yield Piece(file, 0, file.size)
        return
    with file.path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        for stop in _cuts(content, TEXT_CUT if file.kind == "text" else LINE_CUT):
            yield Piece(file, start, stop)
            start = stop


def read(piece: Piece, field: str) -> Iterator[Row]:
    """Every row of a piece: one for a text, otherwise one a line."""
    try:
        if piece.file.kind == "text":
            yield _parse_text(_read_bytes(piece))
        else:
            for number, line in enumerate(_lines(piece)):
                if number == 0 and piece.start == 0:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark is no JSON
                yield _parse_line(line, field)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(
            f"{piece.file.name!r} is damaged: {error}", "fetch it again, or leave it out of data.source"
        ) from None


def _cuts(content: mmap.mmap, pattern: re.Pattern[bytes]) -> Iterator[int]:
    position = 0
    while match := pattern.search(content, position + PIECE_BYTES):
        if match.end() == len(content):
            break
        yield (position := match.end())
    yield len(content)


def _lines(piece: Piece) -> Iterator[bytes]:
    if piece.file.compressed:
        with gzip.open(piece.file.path) as stream:
            yield from stream
        return
    # Only \n ends a line: str.splitlines would also cut at characters that JSON allows inside a text.
    lines = _read_bytes(piece).split(b"\n")
    yield from lines if lines[-1] else lines[:-1]


def _read_bytes(piece: Piece) -> bytes:
    if piece.file.compressed:
        with gzip.open(piece.file.path) as stream:
            return stream.read()
    with piece.file.path.open("rb") as handle:
        handle.seek(piece.start)
        return handle.read(piece.stop - piece.start)


def _parse_text(content: bytes) -> Row:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return Row(None, "invalid UTF-8", _show(content), lines=content.count(b"\n"))
    return Row(text, lines=text.count("\n")) if text else Row(None, "empty")


def _parse_line(line: bytes, field: str) -> Row:
    if not line.strip():
        return Row(None)
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return Row(None, "invalid UTF-8", _show(line))
    except (ValueError, RecursionError):
        return Row(None, "broken JSON", _show(line))
    if not isinstance(value, dict):
        reason = "not an object"
    elif field not in value:
        reason = f"no field {field!r}"
    elif not isinstance(text := value[field], str):
        reason = f"field {field!r} is not a text"
    elif not text:
        reason = "empty"
    elif not _encodable(text):
        reason = "invalid UTF-8"
    else:
        return Row(text)
    return Row(None, reason, _show(line))


def _encodable(text: str) -> bool:
    """JSON can write half a surrogate pair (``"\\ud800"``), which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(content: bytes) -> str:
    return content[: 4 * SHOWN].decode("utf-8", errors="replace")[:SHOWN]
