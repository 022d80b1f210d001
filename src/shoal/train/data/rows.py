"""Cut source files into pieces that can be read independently, and read the documents in each."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from shoal.facts.problem import BadInput
from shoal.train.data.compression import DAMAGE, open_compressed
from shoal.train.data.row_format import EMPTY, RowFormat, SourceText
from shoal.train.data.sources import SourceFile
from shoal.train.data.tables import read_table, row_group_bytes

# A piece is about this many bytes. It decides where a long text is cut, hence (rarely) tokens: changing it requires a
# new format version.
PIECE_BYTES = 4 << 20
# The most to hold in memory at once, whatever a file claims or unpacks to: far beyond any document.
LONGEST_LINE = 1 << 26
LONGEST_TEXT = 1 << 28
SHOWN = 200  # characters of a bad row kept to recognise it

# A long text is cut after a line end between two visible characters: common tokenizers never merge tokens across such a
# place. A file without one stays whole.
TEXT_CUT = re.compile(rb"[^\s]\r?\n(?=[^\s])")
LINE_CUT = re.compile(rb"\n")


@dataclass(frozen=True)
class FilePiece:
    """A byte range of one file. A compressed file is one piece: it can only be read from its start.

    For a table, the range assumes that all row groups are equally large.
    """

    file: SourceFile
    start: int
    stop: int
    groups: range = range(0)

    @property
    def closes(self) -> bool:
        """Whether a text's document ends here and not in a later piece."""
        return self.stop == self.file.size


@dataclass(frozen=True)
class SourceRow:
    """One line or one text: a document, a pair, or the reason why it is neither. Blank lines have nothing."""

    documents: tuple[SourceText, ...] | None
    reason: str = ""
    shown: str = ""
    lines: int = 1  # line ends it spans, for numbering later lines


def cut(file: SourceFile) -> Iterator[FilePiece]:
    """The pieces of a file, in order. They depend only on its content, not on who reads them."""
    if file.kind == "table":
        yield from _cut_table(file)
        return
    if file.compressed or file.size <= PIECE_BYTES:
        yield FilePiece(file, 0, file.size)
        return
    with file.path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        for stop in _cuts(content, TEXT_CUT if file.kind == "text" else LINE_CUT):
            yield FilePiece(file, start, stop)
            start = stop


def read(piece: FilePiece, reading: RowFormat) -> Iterator[SourceRow]:
    """Every row of a piece: one for a text, otherwise one per line."""
    try:
        if piece.file.kind == "text":
            yield _parse_text(_read_text(piece))
        elif piece.file.kind == "table":
            column = reading.field if reading.format == "text" else None
            for row in read_table(piece.file.path, piece.file.name, piece.groups, column):
                yield _parse_row(row, reading)
        else:
            for number, line in enumerate(_lines(piece)):
                if number == 0 and piece.start == 0:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark is not JSON
                yield _parse_line(line, reading)
    except DAMAGE as error:
        raise BadInput(
            f"{piece.file.name!r} is damaged: {error}", "fetch it again, or leave it out of data.source"
        ) from None


def _cut_table(file: SourceFile) -> Iterator[FilePiece]:
    sizes = row_group_bytes(file.path)
    first, waiting = 0, 0
    for number, size in enumerate(sizes, 1):
        waiting += size
        if waiting >= PIECE_BYTES or number == len(sizes):
            start, stop = (file.size * place // len(sizes) for place in (first, number))
            yield FilePiece(file, start, stop, range(first, number))
            first, waiting = number, 0


def _cuts(content: mmap.mmap, pattern: re.Pattern[bytes]) -> Iterator[int]:
    position = 0
    while match := pattern.search(content, position + PIECE_BYTES):
        if match.end() == len(content):
            break
        yield (position := match.end())
    yield len(content)


def _lines(piece: FilePiece) -> Iterator[bytes]:
    # Only \n ends a line: str.splitlines would also split at characters that JSON allows inside a text.
    with _open(piece) as stream:
        left = None if piece.file.compressed else piece.stop - piece.start
        while left != 0 and (line := stream.readline(LONGEST_LINE + 1)):
            if len(line) > LONGEST_LINE:
                number = _line_number(piece, stream.tell() - len(line))
                raise BadInput(
                    f"{piece.file.name!r}, line {number}, is longer than {LONGEST_LINE >> 20} MiB, the most that a "
                    "document may have",
                    "cut it into several, or leave the file out of data.source",
                )
            if left is None:
                yield line
            else:
                left -= len(line)
                yield line.removesuffix(b"\n")


def _read_text(piece: FilePiece) -> bytes:
    """Read a compressed text whole, and a plain one too if it has no place to cut."""
    most = LONGEST_TEXT + 1
    with _open(piece) as stream:
        content = stream.read(most if piece.file.compressed else min(most, piece.stop - piece.start))
    if len(content) == most:
        fix = "unpack it: plain text is read in parts" if piece.file.compressed else "break its lines"
        number = _line_number(piece, piece.start)
        raise BadInput(
            f"{piece.file.name!r}: from line {number} on there are more than {LONGEST_TEXT >> 20} MiB that can only be "
            "read at once",
            f"{fix}, or leave the file out of data.source",
        )
    return content


def _open(piece: FilePiece) -> IO[bytes]:
    if piece.file.compressed:
        return open_compressed(piece.file.path, piece.file.compression)
    handle = piece.file.path.open("rb")
    handle.seek(piece.start)
    return handle


def _line_number(piece: FilePiece, position: int) -> int:
    """The number, from 1, of the line that begins at a position of the (unpacked) file."""
    number, left = 1, position
    with _open(FilePiece(piece.file, 0, piece.file.size)) as stream:
        while left and (block := stream.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    return number


def _parse_text(content: bytes) -> SourceRow:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return SourceRow(None, "invalid UTF-8", _show(content), lines=content.count(b"\n"))
    return SourceRow((SourceText(text),), lines=text.count("\n")) if text else SourceRow(None, EMPTY)


def _parse_line(line: bytes, reading: RowFormat) -> SourceRow:
    if not line.strip():
        return SourceRow(None)
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return SourceRow(None, "invalid UTF-8", _show(line))
    except (ValueError, RecursionError):
        return SourceRow(None, "broken JSON", _show(line))
    found = reading.documents(value) if isinstance(value, dict) else "not an object"
    return SourceRow(None, found, _show(line)) if isinstance(found, str) else SourceRow(found)


def _parse_row(row: dict[str, Any], reading: RowFormat) -> SourceRow:
    found = reading.documents(row)
    return SourceRow(None, found, str(row)[:SHOWN]) if isinstance(found, str) else SourceRow(found)


def _show(content: bytes) -> str:
    return content[: 4 * SHOWN].decode("utf-8", errors="replace")[:SHOWN]
