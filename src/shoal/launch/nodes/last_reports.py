"""The leader's side of the exchange: receives all nodes' reports, refuses some, and publishes what to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal.launch.nodes.exchange import (
    CALL,
    CALL_BEAT,
    CHOICE,
    MOST_NUMBERS,
    MeetingThread,
    ToldDocument,
    beat_key,
    node_key,
    tick_of,
)
from shoal.launch.nodes.messages import Status
from shoal.launch.nodes.relay import FRESH, MANY, passed_key, read_passed
from shoal.parallel.signed_store import SignedStore

# With many launchers, the leader looks for new ones only after this many exchanges.
LOOK_FOR_MORE = 8
# The most numbers in a row that the leader skips: free ones, and those with foreign values.
MOST_STRANGE = 64


@dataclass
class LastReport:
    """A node's last report, and when it last changed."""

    status: Status
    at: float
    beat: int = 0
    relayed: float = 0.0  # when a heartbeat last came through a relay head


class Leader(MeetingThread):
    """Receives all nodes' reports, and publishes what to do. Its own node is the first of them."""

    def __init__(self, store: SignedStore, status: Status, timeout: float) -> None:
        super().__init__(store, status, timeout)
        self._heard: dict[int, LastReport] = {}
        self._beating: list[int] = []  # nodes whose heartbeats are read at once
        self._joined = 0  # all numbers up to this are taken, by launchers that were accepted or refused
        self._numbers: dict[str, list[int]] = {}  # numbers by name, in order of arrival
        self._call_news, self._call = True, ToldDocument()
        store.set(CALL, self.call.model_dump_json())
        store.set(CALL_BEAT, f"0 0 {self.tick}")

    def command(self, **changes: Any) -> None:
        with self._changed:
            self.call, self._call_news = self.call.model_copy(update=changes), True
        self._wake.set()

    def alive(self) -> Mapping[int, Status]:
        """The nodes that are alive, this one first."""
        now = time.monotonic()
        with self._changed:
            others = {
                number: one.status
                for number, one in sorted(self._heard.items())
                if now - one.at < self.patience and number not in self.call.refused
            }
            return {self.number: self.status, **others}

    def heard(self) -> list[Status]:
        """Every other node's last status, including refused ones."""
        return [one.status for one in self._heard.values()]

    def silent_for(self, number: int) -> float:
        heard = self._heard.get(number)
        return time.monotonic() - heard.at if heard else float("inf")

    def name_of(self, number: int) -> str:
        status = self.last_of(number)
        return status.name if status else f"number {number}"

    def last_of(self, number: int) -> Status | None:
        """A node's last status, however old."""
        if number == self.number:
            return self.status
        heard = self._heard.get(number)
        return heard.status if heard else None

    def _exchange(self) -> None:
        self._tell_status()
        self._hear_beats()
        if not self.call.relays or self.exchanges % LOOK_FOR_MORE == 0:
            self._hear_others()
        self._refuse_namesakes()
        self.tick = tick_of(1 + len(self._heard), self.patience)
        if self.call.relays != (len(self._heard) >= MANY):
            self.command(relays=not self.call.relays)
        with self._changed:
            beat = self.call.beat + 1
            self.call = self.call.model_copy(update={"beat": beat})
            if self._call_news:
                self._call, self._call_news = ToldDocument(self.call.model_dump_json(), beat), False
        if self._call.due(beat):
            self.store.set(CALL, self._call.text)
        self.store.set(CALL_BEAT, f"{beat} {self._call.beat} {self.tick:.3f}")

    def _hear_beats(self) -> None:
        """Read the heartbeats of all known nodes, and the documents of those that say theirs has changed."""
        now, beats = time.monotonic(), dict[int, tuple[int, int]]()
        heads = [number for number in self._beating if self._heard[number].status.relay]
        for text in self.store.read_all([passed_key(head) for head in heads]):
            beats |= read_passed(text or "")
        for number, (beat, _) in beats.items():
            if number in self._heard and beat > self._heard[number].beat:
                self._heard[number].relayed = now
        told = [number for number in self._beating if now - self._heard[number].relayed > FRESH * self.tick]
        for number, text in zip(told, self.store.read_all([*map(beat_key, told)]), strict=True):
            beat, valid = map(int, (text or "0 0").split())
            if beat >= beats.get(number, (0, 0))[0]:
                beats[number] = beat, valid
        changed = []
        for number, (beat, valid) in beats.items():
            heard = self._heard.get(number)
            if heard is not None and beat > heard.beat:  # another process may have restored an older one
                heard.beat, heard.at = beat, now
            if heard is not None and valid > heard.status.beat:
                changed.append(number)
        for number, text in zip(changed, self.store.read_all(list(map(node_key, changed))), strict=True):
            self._take_document(number, text)

    def _hear_others(self) -> None:
        """Look for new launchers, despite foreign values, and for known ones without a heartbeat yet."""
        beating, number = set(self._beating), self._joined
        free = strange = 0  # in a row: launchers that arrive together may skip numbers
        while number < MOST_NUMBERS and free <= CHOICE and strange <= MOST_STRANGE:
            number += 1
            if number in beating or number == self.number:
                free = strange = 0
                continue
            text, foreign = self.store.look(node_key(number))
            if text is None:
                free, strange = free + (not foreign), strange + foreign
                continue
            free = strange = 0
            self._take_document(number, text)
            if number in self._heard and self.store.has(beat_key(number)):
                self._beating.append(number)
        while self._joined + 1 == self.number or self._joined + 1 in beating:
            self._joined += 1

    def _take_document(self, number: int, text: str | None) -> None:
        if text is None:
            return
        try:
            told = Status.model_validate_json(text)
        except ValidationError:
            self._refuse(
                number, "it speaks otherwise than the node that leads: not the same version of Shoal"
            )
            return
        before = self._heard.get(number)
        if before is None or before.status.beat < told.beat:
            with self._changed:
                beat = max(told.beat, before.beat if before else 0)
                relayed = before.relayed if before else 0.0
                self._heard[number] = LastReport(told, time.monotonic(), beat, relayed)
            if before is None:
                self._numbers.setdefault(told.name, []).append(number)
                self._refuse_other(number, told)

    def _refuse_namesakes(self) -> None:
        """Of two live launchers with the same name refuse the later one: they would share one memory.

        A launcher that lost us and found us again has a new number, but is the same process.
        """
        if not any(numbers[1:] or name == self.status.name for name, numbers in self._numbers.items()):
            return
        first: dict[str, tuple[int, Status]] = {}
        for number, status in sorted(self.alive().items()):
            other, known = first.setdefault(status.name, (number, status))
            lives = other == self.number or self.silent_for(other) < 4 * self.tick
            if lives and (known.host, known.process) != (status.host, status.process):
                self._refuse(
                    number,
                    f"another live launcher is called {status.name!r}: give each node a name, --node NAME",
                )

    def _refuse_other(self, number: int, status: Status) -> None:
        """Refuse a launcher whose ranks would train something else."""
        if status.trouble:
            self._refuse(number, status.trouble)
            return
        names = sorted(self.status.facts.keys() | status.facts.keys())
        differ = [name for name in names if self.status.facts.get(name) != status.facts.get(name)]
        if differ:
            leader = f"node {self.status.name}, which leads"
            self._refuse(number, f"node {status.name} differs from {leader}, in {', '.join(differ)}")

    def _refuse(self, number: int, why: str) -> None:
        if number not in self.call.refused:
            with self._changed:
                refused = {**self.call.refused, number: why}
                self.call, self._call_news = self.call.model_copy(update={"refused": refused}), True
