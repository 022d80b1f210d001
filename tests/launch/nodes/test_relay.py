"""Of many launchers some pass on the beats of others; one of these that is lost takes no other along."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.launch.nodes.test_meeting import Meeting, status, together

from shoal.launch.nodes import exchange, last_reports, relay, watched_ranks
from shoal.launch.nodes.exchange import Follower, tick_of
from shoal.launch.nodes.last_reports import Leader
from shoal.launch.nodes.messages import End, Round
from shoal.launch.nodes.watched_ranks import EveryRank, RankReporter
from shoal.observe.flight_recorder import Channel, Snapshot
from shoal.train.guard.watchdog import Limits, Watchdog

__all__ = ["together"]  # a fixture of the meeting's own tests


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """A meeting that counts as large: two and more launchers, every fourth of which is a head."""
    monkeypatch.setattr(relay, "GROUP", 4)
    monkeypatch.setattr(last_reports, "MANY", 2)
    monkeypatch.setattr(exchange, "REPEAT", 2)
    made = Meeting()
    yield made
    for one in made.talking:
        one.close()


def _relayed(followers: list[Follower]) -> bool:
    return all(one.link is not None and one.link.fresh(one.tick) for one in followers)


def _is_relayed(leader: Leader, one: Follower) -> bool:
    heard = leader._heard.get(one.number)
    return heard is not None and heard.relayed > 0


def test_beats_come_by_way_of_a_head_and_without_it_directly(many: Meeting) -> None:
    leader = many.leader
    followers = [many.join(f"n{number}", process=number) for number in range(2, 8)]
    assert [one.number for one in followers] == [2, 3, 4, 5, 6, 7]
    head, members = followers[2], followers[3:]
    assert many.hears(lambda: _relayed(members), 20)
    assert many.hears(lambda: all(_is_relayed(leader, one) for one in members))
    # What is said is heard both ways.
    members[0].say(ready=5)
    assert many.hears(lambda: leader.alive()[5].ready == 5)
    leader.command(end=End(message="over"))
    assert all(one.wait(lambda one=one: one.call.end is not None, 10) for one in followers)
    # Its own beat is no longer among those that the leader's store has new ones of.
    stale = leader.store.read(exchange.beat_key(5))
    assert stale is not None and int(stale.split()[0]) < members[0].status.beat

    head.close()  # its store answers still, and has nothing new to say
    assert many.hears(lambda: head.number not in leader.alive(), 10)
    deadline = time.monotonic() + leader.patience
    while time.monotonic() < deadline:
        assert {one.number for one in members} <= leader.alive().keys()
        assert not any(one.lost for one in members)
        time.sleep(0.05)
    assert not leader.broken and leader.alive()[5].ready == 5


def test_many_launchers_that_come_at_once_get_numbers_that_the_leader_finds(many: Meeting) -> None:
    import threading

    joined: list[Follower] = []
    threads = [
        threading.Thread(target=lambda n=number: joined.append(many.join(f"n{n}", process=n)))
        for number in range(2, 22)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.number for one in joined}) == 20
    assert many.hears(lambda: {one.number for one in joined} <= many.leader.alive().keys(), 20)


def test_a_launcher_has_three_messages_an_exchange_at_most(together: Meeting) -> None:
    """The figure of docs/scale.md; a document that has changed is one more, once."""
    follower = Follower(together.connect(), status("b"), 60.0)
    asked: list[str] = []
    look, put = follower.store._look, follower.store.set
    follower.store._look = lambda key: asked.append(key) or look(key)  # type: ignore[assignment,method-assign]
    follower.store.set = lambda *given: asked.append(given[0]) or put(*given)  # type: ignore[assignment,method-assign]
    for _ in range(5 * exchange.REPEAT):
        assert follower.turn()
    assert len(asked) <= 3 * follower.exchanges


def test_more_launchers_talk_less_often_but_often_enough() -> None:
    assert tick_of(2, 10.0) == tick_of(512, 10.0) == pytest.approx(0.1)
    assert tick_of(2048, 10.0) == pytest.approx(0.4)
    assert tick_of(2048, 2.0) <= 2.0 / 12


class Ranks:
    """Two ranks of one node, of which the first may be late."""

    def __init__(self, first: int) -> None:
        self.readers = {first: None, first + 1: None}
        self.done, self.late = 1, False

    def look(self, entries: bool = False) -> list[Snapshot]:
        channel = Channel("7", "dp", tuple(range(4)))
        counts = [self.done - (self.late and number == 0) for number in (0, 1)]
        return [
            Snapshot(rank, 1, count, "step", 1, {channel: count}, ())
            for rank, count in zip(self.readers, counts, strict=True)
        ]

    def any_stopped(self) -> bool:
        return False

    def evidence(self, snapshots: object, patience: float) -> dict[int, object]:
        return {}


def test_of_many_ranks_only_what_is_suspicious_is_told_and_the_late_one_is_named(
    many: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_ranks, "ALWAYS", 2)
    monkeypatch.setattr(watched_ranks, "DUMP_SECONDS", 0.5)
    leader, follower = many.leader, many.join("b")
    round = Round(number=1, nodes=(1, follower.number), attempt="0a0a0a0a-1", layout="dp=4", cluster={})
    here, there = Ranks(0), Ranks(2)
    every = EveryRank(leader, round, here, 0.1, world=4)
    watchdog = Watchdog(every, Limits(0.4, 5.0))
    reporter = RankReporter(there, 0.1, 0, 0.1, world=4)

    def tell() -> None:
        follower.say(round=1, **reporter.tell(follower.call.ask, follower.call.details))

    for _ in range(10):
        here.done, there.done = here.done + 1, there.done + 1
        tell()
        time.sleep(0.06)
        assert watchdog.poll() is None
    assert many.hears(lambda: not leader.call.details and not leader.alive()[follower.number].seen)
    here.done, there.done, there.late = 50, 50, True
    verdict, deadline = None, time.monotonic() + 20
    while verdict is None:
        assert time.monotonic() < deadline
        tell()
        verdict = watchdog.poll()
        time.sleep(0.02)
    assert verdict.rank == 2 and leader.call.details
    there.late, here.done, there.done = False, 60, 60
    while leader.call.details:
        assert time.monotonic() < deadline
        here.done, there.done = here.done + 1, there.done + 1
        tell()
        watchdog.poll()
        time.sleep(0.05)


def test_a_status_fits_into_a_message() -> None:
    assert len(status("a").model_dump_json()) < 1000
