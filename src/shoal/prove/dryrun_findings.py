"""Differences between a dry run and its prediction, in words: operation, category, module, line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.facts.ledger import CATEGORIES, PART_OF, Ledger
from shoal.facts.schedules.programs import RECEIVES, SENDS, Instruction, rank_program
from shoal.facts.strategies import PIPELINE
from shoal.facts.traffic import Traffic
from shoal.observe.collectives import IssuedCall
from shoal.observe.memory import AllocationSite
from shoal.predict.traffic.pipeline import message_bytes
from shoal.predict.workload import Workload

# The tolerated error of a category and of the peak; and the fraction of the peak below which nothing is reported.
TOLERANCE = 0.01
NEGLIGIBLE = 0.002
# Differences below this are not reported, however small the model: torch allocates device memory in blocks of 2 MiB, so
# an eighth of one does not decide what fits. It matters only for toy models, whose 1 % is a few numbers per layer.
FLOOR = 2**18
# Lines and modules named per finding.
NAMED = 3


class Finding(NamedTuple):
    """One difference."""

    kind: str  # "traffic", "messages" or "memory"
    text: str


def in_traffic(
    seen: list[Traffic], predicted: list[Traffic], calls: Sequence[IssuedCall]
) -> Iterator[Finding]:
    """Compare traffic operation by operation, byte by byte."""
    here = {(row.op, row.group): row for row in seen}
    said = {(row.op, row.group): row for row in predicted}
    for op, group in sorted(here.keys() | said.keys()):
        found, wanted = here.get((op, group)), said.get((op, group))
        if found == wanted:
            continue
        lines = Counter(call.where for call in calls if (call.op, call.group) == (op, group))
        issued = f"; issued by {_listed(lines)}" if lines else ""
        yield Finding("traffic", f"{op} in {group}: {_row(found)}, predicted {_row(wanted)}{issued}")


def in_messages(workload: Workload, place: int, calls: Sequence[IssuedCall]) -> Iterator[Finding]:
    """Whether a pipeline's rank sends and receives in the order of its schedule, with the right number of bytes."""
    layout = workload.layout
    program = rank_program(layout.schedule, layout.pp, layout.chunks, workload.accumulation, place)
    wanted = [instruction for instruction in program if instruction.action in SENDS | RECEIVES]
    issued, size = _messages(calls), message_bytes(workload)
    for number, (call, instruction) in enumerate(zip(issued, wanted, strict=False), start=1):
        if (call.op, call.peer, call.bytes) != (_op(instruction), instruction.peer, size):
            yield Finding(
                "messages",
                f"message {number} of the step is a {call.op} of {call.bytes:,} bytes with pipeline rank {call.peer}; "
                f"the schedule has {instruction}, a {_op(instruction)} of {size:,} bytes with rank {instruction.peer} "
                f"({call.where})",
            )
            return
    if len(issued) != len(wanted):
        yield Finding("messages", f"{len(issued)} messages, the schedule has {len(wanted)}")


def between_stages(calls: Sequence[Sequence[IssuedCall]]) -> Iterator[Finding]:
    """Whether every pair of a pipeline's ranks agrees on the messages between them, in order."""
    for sender, issued in enumerate(calls):
        for receiver, expected in enumerate(calls):
            sent = [call for call in _messages(issued) if (call.op, call.peer) == ("send", receiver)]
            received = [call for call in _messages(expected) if (call.op, call.peer) == ("receive", sender)]
            yield from _pair(sender, receiver, sent, received)


def _messages(calls: Sequence[IssuedCall]) -> list[IssuedCall]:
    """The messages between stages: other strategies send messages too."""
    return [call for call in calls if call.purpose == PIPELINE and call.peer is not None]


def _pair(
    sender: int, receiver: int, sent: Sequence[IssuedCall], received: Sequence[IssuedCall]
) -> Iterator[Finding]:
    pair = f"pipeline rank {sender} to {receiver}"
    for number, (one, other) in enumerate(zip(sent, received, strict=False), start=1):
        if (one.bytes, one.dtype) != (other.bytes, other.dtype):
            yield Finding(
                "messages",
                f"{pair}: message {number} leaves with {one.bytes:,} bytes of {one.dtype} ({one.where}) "
                f"and is expected with {other.bytes:,} of {other.dtype} ({other.where})",
            )
            return
    if len(sent) != len(received):
        yield Finding("messages", f"{pair}: {len(sent)} messages are sent and {len(received)} received")


def in_memory(
    seen: Ledger, predicted: Ledger, places: Mapping[AllocationSite, int], floor: int = FLOOR
) -> Iterator[Finding]:
    """Compare every category, and the peak. ``floor``: differences in bytes up to this are not reported."""
    for category in CATEGORIES:
        found, wanted = getattr(seen, category), getattr(predicted, category)
        if abs(found - wanted) <= max(TOLERANCE * wanted, NEGLIGIBLE * predicted.peak_allocated, floor):
            continue
        held = [
            (place, size)
            for place, size in places.items()
            if PART_OF.get(place.category, place.category) == category
        ]
        most = _most((place.module or "no module", size) for place, size in held)
        # What is kept too long may be small in each module; the total of the line that allocated it shows it better.
        lines = _most((place.where, size) for place, size in held if place.where)
        made = (f"; the most is in {most}" if most else "") + (f"; made by {lines}" if lines else "")
        yield Finding("memory", f"{category}: {_off(found, wanted)}{made}")
    if abs(seen.host - predicted.host) > max(TOLERANCE * predicted.host, floor):
        yield Finding("memory", f"host: {_off(seen.host, predicted.host)}")
    if abs(seen.nvme - predicted.nvme) > TOLERANCE * predicted.nvme:
        yield Finding("memory", f"nvme: {_off(seen.nvme, predicted.nvme)}")
    if abs(seen.peak_allocated - predicted.peak_allocated) > max(TOLERANCE * predicted.peak_allocated, floor):
        moment = f"{seen.instant}; predicted: {predicted.instant}"
        yield Finding("memory", f"peak: {_off(seen.peak_allocated, predicted.peak_allocated)} ({moment})")


def _op(instruction: Instruction) -> str:
    return "send" if instruction.action in SENDS else "receive"


def _row(row: Traffic | None) -> str:
    return "none" if row is None else f"{row.count:,} calls with {row.bytes:,} bytes"


def _listed(lines: Counter[str]) -> str:
    # Rarest first: an intruder is not something done in every layer.
    rarest = sorted(lines.items(), key=lambda item: item[1])
    return ", ".join(f"{line or 'torch'} ({count:,} times)" for line, count in rarest[:NAMED])


def _most(sizes: Iterable[tuple[str, int]]) -> str:
    total: Counter[str] = Counter()
    for name, size in sizes:
        total[name] += size
    return ", ".join(f"{name} ({_size(size)})" for name, size in total.most_common(NAMED))


def _off(found: int, wanted: int) -> str:
    percent = f" ({100 * (found - wanted) / wanted:+.1f} %)" if wanted else ""
    return f"{_size(found)}, predicted {_size(wanted)}{percent}"


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} bytes"
