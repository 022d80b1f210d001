"""The attention blocks of one ring-attention step: rectangles of queries and keys that see each other.

Each rank holds an early and a late piece of every row (``facts/layout/sequence.py``). Between two different pieces,
the later one's queries see all keys of the earlier one, as far as their document and the attention window reach
back. Only a document that spans both pieces qualifies, so one rectangle suffices, whatever else the pieces contain.
Within a piece, attention is causal per document. Every query of a rectangle sees at least one of its keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """In rows [first_row, last_row): queries [begin, end) and keys [keys_begin, keys_end), as indices into a rank's
    tokens.

    The first query is ``distance`` tokens after the first key. ``masked``: some query does not see some key,
    because the key comes later or is ``window`` or more tokens back.
    """

    first_row: int
    last_row: int
    begin: int
    end: int
    keys_begin: int
    keys_end: int
    distance: int
    window: int | None
    masked: bool

    @property
    def causal(self) -> bool:
        """Whether queries and keys are the same tokens, with no window cutting them."""
        return self.masked and self.window is None and self.distance == 0


def rectangles(
    ranks: int,
    index: int,
    source: int,
    rows: int,
    tokens: int,
    ends: Sequence[int] | None,
    window: int | None,
) -> Iterator[Rectangle]:
    """Rectangles of rank ``index``'s queries with rank ``source``'s keys. Each rank has ``tokens`` tokens of each
    row.

    ``ends``: cumulative document lengths over all rows, row after row; None: each row is one document.
    """
    size, length = tokens // 2, tokens * ranks
    if window is not None and window >= length:
        window = None
    if ends is None and window is None:
        # Whole pieces: an earlier rank's early piece precedes both pieces of a later rank.
        if source == index:
            yield Rectangle(0, rows, 0, tokens, 0, tokens, 0, None, masked=True)
        elif source < index:
            yield Rectangle(0, rows, 0, tokens, 0, size, (index - source) * size, None, masked=False)
        else:
            yield Rectangle(0, rows, size, tokens, 0, tokens, 0, None, masked=False)
        return
    mine, theirs = (_starts(ranks, rank, size) for rank in (index, source))
    for row in range(1 if ends is None else rows):
        among = (0, rows) if ends is None else (row, row + 1)
        begin_of_row = row * length
        bounds = [0, length] if ends is None else _of_row(ends, begin_of_row, length)
        for number, start in enumerate(mine):
            for other, keys in enumerate(theirs):
                if keys <= start:
                    found = (
                        _within(start, size, bounds, window)
                        if keys == start
                        else _across(start, keys, size, bounds, window)
                    )
                    for one in found:
                        yield _placed(one, among, number * size - start, other * size - keys)


class _Seen(NamedTuple):
    """Queries and keys of one row, by position in the row."""

    begin: int
    end: int
    keys_begin: int
    keys_end: int
    window: int | None
    masked: bool


def _starts(ranks: int, index: int, size: int) -> tuple[int, int]:
    return index * size, (2 * ranks - 1 - index) * size


def _of_row(ends: Sequence[int], start: int, length: int) -> list[int]:
    """Where the documents of a row begin, then where the row ends, relative to the row's start."""
    first = bisect_right(ends, start) - 1
    last = bisect_right(ends, start + length - 1)
    return [ends[number] - start for number in range(first, last)] + [length]


def _within(start: int, size: int, bounds: Sequence[int], window: int | None) -> Iterator[_Seen]:
    """A piece with itself: one causal block per document."""
    number = bisect_right(bounds, start) - 1
    while number + 1 < len(bounds) and bounds[number] < start + size:
        begin, end = max(start, bounds[number]), min(start + size, bounds[number + 1])
        cut = window if window is not None and window < end - begin else None
        yield _Seen(begin, end, begin, end, cut, masked=True)
        number += 1


def _across(start: int, keys: int, size: int, bounds: Sequence[int], window: int | None) -> Iterator[_Seen]:
    """A piece with an earlier one: the block of the document that runs from that piece into this one."""
    number = bisect_right(bounds, start) - 1
    stop = keys + size
    begin, end = max(keys, bounds[number]), min(start + size, bounds[number + 1])
    if window is not None:
        begin, end = max(begin, start - window + 1), min(end, stop - 1 + window)
    if begin < stop and start < end:
        banded = window is not None and end - 1 - begin >= window
        yield _Seen(start, end, begin, stop, window if banded else None, banded)


def _placed(seen: _Seen, rows: tuple[int, int], queries: int, keys: int) -> Rectangle:
    return Rectangle(
        *rows,
        seen.begin + queries,
        seen.end + queries,
        seen.keys_begin + keys,
        seen.keys_end + keys,
        seen.begin - seen.keys_begin,
        seen.window,
        seen.masked,
    )
