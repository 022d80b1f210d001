"""Explain which rank keeps its peers waiting, from the collectives that each has entered.

A collective needs all ranks of its group, and every rank enters a group's collectives in the same order. So a rank that
has entered fewer of them than its peers is the one they wait for; how many have completed does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.facts.traffic import name_ranks, show_ranks
from shoal.observe.flight_recorder import INPUT, Channel, FlightEntry, Snapshot
from shoal.train.guard.stacks import Standing, shown

# Collectives in which the ranks' buffers may differ in size.
UNEVEN = ("all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class Late:
    """A collective that some ranks of its channel have entered and some have not."""

    channel: Channel
    number: int
    missing: tuple[int, ...]
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class StallVerdict:
    """The rank that seems to be at fault, an explanation, and a row of faults.jsonl."""

    rank: int
    message: str
    row: dict[str, Any]


def late_collectives(snapshots: Sequence[Snapshot]) -> list[Late]:
    """The first incomplete collective of every channel. ``snapshots`` are in rank order."""
    channels = dict.fromkeys(channel for snapshot in snapshots for channel in snapshot.counts)
    found = (late_collective(channel, snapshots) for channel in channels)
    return [one for one in found if one is not None]


def late_collective(channel: Channel, snapshots: Sequence[Snapshot]) -> Late | None:
    """A channel's first collective that some of its ranks have entered and some have not."""
    counts = {rank: snapshots[rank].counts.get(channel, 0) for rank in channel.ranks}
    number = min(counts.values()) + 1
    missing = tuple(rank for rank, count in counts.items() if count < number)
    waiting = tuple(rank for rank, count in counts.items() if count >= number)
    return Late(channel, number, missing, waiting) if waiting else None


def root(late: Sequence[Late], standings: Mapping[int, Standing]) -> Late:
    """The root cause: the first that lacks a rank which is not waiting elsewhere. ``late``: the longest wait first.

    A stopped rank comes before all others. A rank that entered something ahead of time counts as waiting there,
    although it may be doing something else. So if all ranks wait for another, those that are seen to wait are left out.
    If really all ranks wait, they have left the common order, and the smallest set of missing ranks is to blame.
    """
    running = {rank for rank, standing in standings.items() if not standing.stopped}
    ahead = {rank for one in late for rank in one.waiting}
    waiting = {rank for rank, standing in standings.items() if standing.waits}
    for waits in (running, ahead, waiting):
        for one in late:
            missing = tuple(rank for rank in one.missing if rank not in waits)
            if missing:
                return Late(one.channel, one.number, missing, one.waiting)
    return min(late, key=lambda one: len(one.missing))


def first_difference(snapshots: Sequence[Snapshot], channel: Channel) -> list[FlightEntry]:
    """What each rank of a group entered under the first sequence number where they disagree; empty if they never do."""
    if channel.directed:
        return []
    entries = [
        {entry.number: entry for entry in snapshots[rank].entries if entry.channel == channel}
        for rank in channel.ranks
    ]
    common = set.intersection(*(set(own) for own in entries))
    for number in sorted(common):
        if len({_kind(own[number]) for own in entries}) > 1:
            return [own[number] for own in entries]
    return []


def _kind(entry: FlightEntry) -> tuple[str, int]:
    return entry.op, 0 if entry.op in UNEVEN else entry.bytes


# Messages.


def explain_late(
    late: Late,
    every: Sequence[Late],
    seconds: float,
    snapshots: Sequence[Snapshot],
    standings: Mapping[int, Standing],
) -> StallVerdict:
    """Explain ranks that have not joined what others wait in. ``every``: all late collectives."""
    asked = _entered(late, snapshots)
    what = f"{asked.op} #{late.number}" if asked else f"#{late.number}"
    size = f", {_size(asked.bytes)}" if asked and asked.bytes else ""
    place = f" at {shown(asked.where)}" if asked else ""
    others, since = name_ranks(late.waiting), f"for {seconds:.0f} s"
    if late.channel.directed:
        sender, receiver = late.channel.ranks
        if late.missing[0] == sender:
            words = f"it has not sent message #{late.number} of group {late.channel.group} to rank {receiver}{size}"
        else:
            words = f"it has not taken message #{late.number} of group {late.channel.group} from rank {sender}{size}"
        words += f", which {others} has waited for{place} {since}"
    else:
        ranks = show_ranks(late.channel.ranks)
        who = "it has" if len(late.missing) == 1 else f"{name_ranks(late.missing)} have"
        words = (
            f"{who} not joined {what} "
            f"of group {late.channel.group} ({ranks}{size}){place}, where {others} "
            f"{_have(late.waiting)} waited {since}"
        )
    # A rank stopped in that phase is not waiting for input: its own line says what it does.
    if snapshots[late.missing[0]].phase == INPUT and not standings[late.missing[0]].stopped:
        words += "\n  it still waits for its input"
    elsewhere = [one for one in every if late.missing[0] in one.waiting]
    if elsewhere and standings[late.missing[0]].waits:
        other = elsewhere[0]
        entry = _entered(other, snapshots)
        words += (
            f"\n  it waits itself, in {entry.op if entry else 'collective'} #{other.number} of group "
            f"{other.channel.group}, which {name_ranks(other.missing)} {_have(other.missing)} not joined"
        )
    if difference := first_difference(snapshots, late.channel):
        words += f"\n  before that they parted: {_parting(late.channel, difference)}"
    rest = {"missing": list(late.missing), "waiting": list(late.waiting), "collective": _row(asked)}
    return _verdict(late.missing[0], words, snapshots, standings, rest)


def explain_difference(
    channel: Channel,
    difference: list[FlightEntry],
    snapshots: Sequence[Snapshot],
    standings: Mapping[int, Standing],
) -> StallVerdict:
    """Explain ranks that entered the same collective with different arguments."""
    odd = _odd(channel, difference)
    words = f"ranks disagree in group {channel.group}: {_parting(channel, difference)}"
    return _verdict(odd, words, snapshots, standings, {"missing": [odd]})


def explain_silence(
    seconds: float, snapshots: Sequence[Snapshot], standings: Mapping[int, Standing]
) -> StallVerdict:
    """Explain ranks that make no progress although none is missing: one may be stopped inside a collective."""
    stopped = [rank for rank, standing in standings.items() if standing.stopped]
    busy = [rank for rank, standing in standings.items() if not standing.waits]
    first = next(iter([*stopped, *busy]), 0)
    words = f"no rank has entered a collective or ended its step for {seconds:.0f} s"
    last = snapshots[first].entries[-1] if snapshots[first].entries else None
    if last:
        ranks, size = show_ranks(last.channel.ranks), _size(last.bytes)
        words += (
            f"; the last that it entered is {last.op} #{last.number} of group {last.channel.group} "
            f"({ranks}, {size}) at {shown(last.where)}"
        )
    return _verdict(first, words, snapshots, standings, {"missing": stopped, "collective": _row(last)})


def _verdict(
    rank: int,
    words: str,
    snapshots: Sequence[Snapshot],
    standings: Mapping[int, Standing],
    rest: dict[str, Any],
) -> StallVerdict:
    at: dict[str, list[int]] = {}
    # The rank in question comes first.
    for number, standing in sorted(standings.items(), key=lambda pair: (pair[0] != rank, pair[0])):
        at.setdefault(str(standing), []).append(number)
    lines = [f"  {name_ranks(ranks)}: {where}" for where, ranks in at.items()]
    step = max(snapshot.step for snapshot in snapshots)
    stands = {str(number): str(standing) for number, standing in standings.items()}
    message = "\n".join([f"in step {step}, {words}", *lines])
    return StallVerdict(rank, message, {"step": step, "rank": rank, **rest, "at": stands})


def _entered(late: Late, snapshots: Sequence[Snapshot]) -> FlightEntry | None:
    """What the waiting ranks have entered; None if it has dropped out of their flight recorders."""
    for rank in late.waiting:
        for entry in snapshots[rank].entries:
            if (entry.channel, entry.number) == (late.channel, late.number):
                return entry
    return None


def _row(entry: FlightEntry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "op": entry.op,
        "group": entry.channel.group,
        "ranks": list(entry.channel.ranks),
        "number": entry.number,
        "bytes": entry.bytes,
        "where": shown(entry.where),
    }


def _parting(channel: Channel, difference: list[FlightEntry]) -> str:
    by_kind: dict[str, list[int]] = {}
    for rank, entry in zip(channel.ranks, difference, strict=True):
        kind = f"{entry.op} ({_size(entry.bytes)}) at {shown(entry.where)}"
        by_kind.setdefault(kind, []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)} entered {kind}" for kind, ranks in by_kind.items())
    return f"as #{difference[0].number}, {told}"


def _odd(channel: Channel, difference: list[FlightEntry]) -> int:
    """A rank of the smallest group; of equally small groups, not the one with the lowest rank."""
    parties: dict[tuple[str, int], list[int]] = {}
    for rank, entry in zip(channel.ranks, difference, strict=True):
        parties.setdefault(_kind(entry), []).append(rank)
    return min(parties.values(), key=lambda party: (len(party), -party[0]))[0]


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
