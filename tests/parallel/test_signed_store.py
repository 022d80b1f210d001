"""A store that everyone can write to: what others put there is never taken for ours, and holds nobody up for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore

from shoal.launch.rendezvous import attempt_store, connect, open_store
from shoal.parallel import signed_store
from shoal.parallel.signed_store import SignedStore, Tampered, new_secret

TIMEOUT = 0.5
SOON = timedelta(seconds=20)


class Stranger(TCPStore):
    def set(self, key: str, value: str | bytes) -> None:
        """As any other, but that it is there when this returns: others have connections of their own."""
        super().set(key, value)
        self.check([key])


class Meeting:
    """A store of ours with two of us at it, and a stranger: another user of the machine."""

    def __init__(self) -> None:
        self.store, _, self.port = open_store("127.0.0.1", TIMEOUT)
        # A rank has longer to connect; that is not how long it may be kept from its peers' values.
        self.one, self.other = (
            connect(self.port, self.store.secret, TIMEOUT, to_connect=600.0) for _ in range(2)
        )
        self.stranger = Stranger("127.0.0.1", self.port, is_master=False)
        self.said: list[str] = []
        self.one.on_forgery(self.said.append)
        self.other.on_forgery(self.said.append)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    yield Meeting()


def test_what_is_written_is_read_and_no_method_waits(meeting: Meeting) -> None:
    one, other = meeting.one, meeting.other
    assert one.read("key") is None and not one.has("key")
    one.set("key", "value ü")
    assert other.wait("key", SOON) == "value ü" == other.read("key")
    assert attempt_store(other, 1).read("key") is None
    attempt_store(one, 1).set("key", "")
    assert attempt_store(other, 1).wait("key", SOON) == "" and not attempt_store(other, 2).has("key")
    one.delete("key")
    assert not other.has("key") and not other.strange("key") and meeting.said == []
    with pytest.raises(DistStoreError, match="key did not come within"):
        other.wait("key", timedelta(seconds=0.05))


def test_what_others_write_counts_as_nothing_and_is_said_once(meeting: Meeting) -> None:
    one, stranger = meeting.one, meeting.stranger
    first, second = attempt_store(meeting.other, 1), attempt_store(one, 2)
    first.set("resumed", "7")
    first.set("told", "8")
    true = stranger.get("workers-1/resumed")
    forged = (
        b"",
        b"\xff\xfe",
        b"7",
        b"0" * 64 + b"7",
        true[:-1] + b"8",  # another content
        stranger.get("workers-1/told"),  # of another key
        b"x" * 100_000,
    )
    for value in forged:
        stranger.set("workers-1/resumed", value)
        assert attempt_store(one, 1).read("resumed") is None, value
        assert attempt_store(one, 1).strange("resumed")
    # What was true in an earlier attempt is not in this one.
    stranger.set("workers-2/resumed", true)
    assert second.read("resumed") is None
    # Nor what another launcher has signed.
    SignedStore(stranger, new_secret()).set("stop", "1")
    assert not one.has("stop")
    assert len(meeting.said) == 1 and "docs/security.md" in meeting.said[0]


def test_who_waits_waits_for_ours_and_not_for_long_where_others_keep_it_from_us(meeting: Meeting) -> None:
    one, other = meeting.one, meeting.other
    meeting.stranger.set("told", "mine")
    threading.Timer(0.1, lambda: other.set("told", "true")).start()
    assert one.wait("told", SOON) == "true"
    meeting.stranger.set("told", "mine")
    began = time.monotonic()
    with pytest.raises(Tampered, match=r"told of the run's store .* docs/security.md"):
        one.wait("told", timedelta(hours=6))
    assert time.monotonic() - began < 20


def test_what_is_deleted_is_written_again_by_who_wrote_it(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of us wait for each other, and a stranger deletes what one of them wrote: as in ``gather``, then ``tell``."""
    monkeypatch.setattr(signed_store, "LOOK_AFTER_SECONDS", 0.01)
    one, other, stranger = attempt_store(meeting.one, 1), attempt_store(meeting.other, 1), meeting.stranger
    one.set("gathered", "mine")
    other.wait("gathered", SOON)
    assert stranger.delete_key("workers-1/gathered")
    heard: list[str] = []

    def answer() -> None:
        other.set("told", "back: " + other.wait("gathered", SOON))

    thread = threading.Thread(target=answer)
    thread.start()
    heard.append(one.wait("told", SOON))
    thread.join()
    assert heard == ["back: mine"] and len(meeting.said) == 1

    # One who does not stop deleting ends the run, and is told of.
    going = threading.Event()

    def delete() -> None:
        while not going.is_set():
            stranger.delete_key("workers-1/told")

    thread = threading.Thread(target=delete)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(Tampered, match="workers-1/told"):
            other.wait("never", timedelta(hours=6))
    finally:
        going.set()
        thread.join()
    assert time.monotonic() - began < 20


def test_of_a_series_the_last_two_stay(meeting: Meeting) -> None:
    for number in range(5):
        meeting.one.set(f"save-{number}", str(number), series="saves")
        meeting.other.wait(f"save-{number}", SOON)
    assert [number for number in range(5) if meeting.other.has(f"save-{number}")] == [3, 4]


def test_a_place_is_taken_once_and_a_stranger_has_none(meeting: Meeting) -> None:
    assert meeting.one.claim("node-1", "a") and not meeting.other.claim("node-1", "b")
    for value in (b"", b"\xff\x00", b"10"):
        meeting.stranger.set("node-2", value)
        assert meeting.other.claim("node-2", "b") and not meeting.one.claim("node-2", "c")
        assert meeting.one.read("node-2") == "b"


def test_a_look_costs_little(meeting: Meeting) -> None:
    """Launchers exchange their documents ten times a second."""
    document = "x" * 20_000
    meeting.one.set("node-1", document)
    meeting.other.wait("node-1", SOON)
    began = time.process_time()
    for _ in range(200):
        assert meeting.other.read("node-1") == document
    assert (time.process_time() - began) / 200 < 0.005
