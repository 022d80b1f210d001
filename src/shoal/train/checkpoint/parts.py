"""Large manifests in parts: each rank lists its pieces in its own file; the manifest names and indexes these lists.

A checkpoint of ten thousand ranks has millions of pieces, and a rank needs a few hundred of them. So above a number of
pieces each rank writes its list beside its bytes (``rank-00007.json``). The manifest holds the length and hash of every
list, and for every tensor which ranks have a piece of it, and of which box. Ranks that are evenly spaced in a tensor
share one entry, so the index is small. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from pydantic import ValidationError

from shoal.facts.input.untrusted_files import first_fault
from shoal.facts.optimizers import OF_MATRICES
from shoal.train.checkpoint.manifest import (
    IN_PARTS,
    Damaged,
    ListedPart,
    Manifest,
    PartRun,
    StoredPiece,
    check_complete,
    check_piece,
    dump,
)

if TYPE_CHECKING:
    from shoal.train.checkpoint.storage import CheckpointStorage

# The most pieces a manifest lists itself: 10 MB, read in a second. Above that, ranks list their own.
MOST_LISTED = 50_000
# Lists read concurrently.
READERS = 8

Box = tuple[tuple[int, ...], tuple[int, ...]]
# For each kind of state shape and each tensor, the box that covers all pieces of one rank. Most states have their
# tensor's shape and placement.
Coverage = dict[str, dict[str, Box]]


def listed_apart(pieces: int, world: int) -> bool:
    """Whether a rank lists its pieces itself, assuming that all ranks have equally many."""
    return pieces * world > MOST_LISTED


def list_name(file: str) -> str:
    """The name of the list beside a rank's file."""
    return file.rpartition(".")[0] + ".json"


def list_text(pieces: Iterable[StoredPiece]) -> str:
    """The list's content, without the file's name, which is in the manifest."""
    return dump({"pieces": [piece.model_dump(mode="json", exclude={"file"}) for piece in pieces]}) + "\n"


def part_of(file: str, text: str, pieces: Sequence[StoredPiece]) -> ListedPart:
    """The manifest's entry for a list. ``file``: the name of the file whose pieces are listed."""
    content = text.encode()
    return ListedPart(
        file=file,
        bytes=len(content),
        hash=blake3(content).hexdigest(),
        of=pieces[0].file,
        size=sum(piece.bytes for piece in pieces),
        pieces=len(pieces),
    )


def coverage(pieces: Iterable[StoredPiece]) -> Coverage:
    found: Coverage = {}
    for piece in pieces:
        of_tensor = found.setdefault(_kind(piece.state), {})
        box = piece.offset, piece.size
        of_tensor[piece.tensor] = _around(of_tensor[piece.tensor], box) if piece.tensor in of_tensor else box
    return found


def coverage_from_json(content: Mapping[str, Mapping[str, Any]]) -> Coverage:
    return {
        kind: {tensor: (tuple(offset), tuple(size)) for tensor, (offset, size) in boxes.items()}
        for kind, boxes in content.items()
    }


def index_of(coverages: Sequence[Coverage]) -> dict[str, dict[str, tuple[PartRun, ...]]]:
    """For each tensor, the parts that have pieces of it. ``coverages`` are in the order of parts."""
    entries: dict[str, dict[str, list[tuple[Box, int]]]] = {}
    for part, found in enumerate(coverages):
        for kind, boxes in found.items():
            of_kind = entries.setdefault(kind, {})
            for tensor, box in boxes.items():
                of_kind.setdefault(tensor, []).append((box, part))
    return {
        kind: {tensor: tuple(_runs(boxes)) for tensor, boxes in of_kind.items()}
        for kind, of_kind in entries.items()
    }


def in_parts(
    manifest: Manifest,
    parts: Sequence[ListedPart],
    index: dict[str, dict[str, tuple[PartRun, ...]]],
    states: set[str],
) -> Manifest:
    changes = {"format": IN_PARTS, "parts": tuple(parts), "index": index, "states": tuple(sorted(states))}
    return manifest.model_copy(update=changes)


def parts_near(manifest: Manifest, state: str, tensor: str, box: Box) -> set[int]:
    """All parts that may have an element of a box of a tensor's state."""
    runs = manifest.index.get(_kind(state), {}).get(tensor, ())
    return {part for run in runs for part in _near(run, box)}


def read_part(place: CheckpointStorage, step: int, manifest: Manifest, part: ListedPart) -> list[StoredPiece]:
    """The pieces that a part lists, verified."""
    where = f"{place.name(step)}/{part.file}"
    found = place.size(step, part.file)
    if found != part.bytes:
        raise Damaged(f"{where} has {found} bytes, and {part.bytes} were written")
    content = bytearray(part.bytes)
    place.read(step, part.file, 0, memoryview(content))
    if blake3(content).hexdigest() != part.hash:
        raise Damaged(f"{where}: its bytes are not those that were written (BLAKE3 differs)")
    try:
        pieces = [
            StoredPiece.model_validate({**row, "file": part.of}) for row in json.loads(content)["pieces"]
        ]
    except ValidationError as error:
        raise Damaged(f"{where} is no list of pieces: {first_fault(error)}") from None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Damaged(f"{where} is no list of pieces: {error}") from None
    end = 0
    for piece in sorted(pieces, key=lambda one: one.position):
        check_piece(piece, manifest.shape_of(piece.state, piece.tensor), where)
        if piece.position != end or piece.state not in manifest.states:
            raise Damaged(f"{where}: the pieces of {part.of} overlap or leave a gap at byte {end}")
        end += piece.bytes
    if (end, len(pieces)) != (part.size, part.pieces):
        raise Damaged(f"{where} lists {end} bytes, and {part.size} were written")
    return pieces


def completed(place: CheckpointStorage, step: int, manifest: Manifest) -> Manifest:
    """The manifest with the pieces of all parts, as if it listed them itself; every element is covered once."""
    if not manifest.parts:
        return manifest
    with ThreadPoolExecutor(READERS, "shoal-parts") as pool:
        lists = list(pool.map(lambda part: read_part(place, step, manifest, part), manifest.parts))
    # A rank would not find pieces that the index does not mention.
    if index_of([coverage(pieces) for pieces in lists]) != manifest.index:
        raise Damaged(f"{place.name(step)}: its index is not that of its parts")
    every = tuple(piece for pieces in lists for piece in pieces)
    whole = manifest.model_copy(update={"pieces": (*manifest.pieces, *every)})
    check_complete(whole, place.name(step))
    return whole


def _kind(state: str) -> str:
    """States whose shape differs from their tensor's are indexed by their own names."""
    return state if state in OF_MATRICES else ""


def _around(one: Box, other: Box) -> Box:
    start = tuple(map(min, one[0], other[0]))
    ends = (max(a + b, c + d) for a, b, c, d in zip(*one, *other, strict=True))
    return start, tuple(end - first for first, end in zip(start, ends, strict=True))


def _runs(boxes: list[tuple[Box, int]]) -> Iterable[PartRun]:
    """Merge evenly spaced boxes of one size, from evenly spaced parts, into single entries."""
    # The last axis first: boxes with the same columns are spaced along the rows.
    in_order = sorted(boxes, key=lambda entry: (entry[0][1], entry[0][0][::-1], entry[1]))
    run: PartRun | None = None
    for (offset, size), part in in_order:
        longer = _extended(run, offset, size, part) if run is not None else None
        if run is not None and longer is None:
            yield run
        run = longer or (part, 0, 1, offset, (0,) * len(offset), size)
    if run is not None:
        yield run


def _extended(run: PartRun, offset: tuple[int, ...], size: tuple[int, ...], part: int) -> PartRun | None:
    first, step, count, start, apart, of_size = run
    if size != of_size:
        return None
    if count == 1:
        step = part - first
        apart = tuple(one - other for one, other in zip(offset, start, strict=True))
        return None if min((step, *apart)) < 0 else (first, step, 2, start, apart, size)
    expected = tuple(one + count * gap for one, gap in zip(start, apart, strict=True))
    return (
        (first, step, count + 1, start, apart, size)
        if (first + count * step, expected) == (part, offset)
        else None
    )


def _near(run: PartRun, box: Box) -> Iterable[int]:
    """The parts of a run whose box overlaps ``box``."""
    first, step, count, offset, apart, size = run
    low, high = 0, count
    for start, gap, length, wanted, wide in zip(offset, apart, size, *box, strict=True):
        if gap == 0:
            if start >= wanted + wide or start + length <= wanted:
                return ()
        else:
            low = max(low, (wanted - start - length) // gap + 1)
            high = min(high, -((start - wanted - wide) // gap))
    return (first + step * number for number in range(low, high))
