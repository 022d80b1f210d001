"""Launchers that meet: who is heard, who is lost, who is refused; and bad input, which starts nothing."""

from __future__ import annotations

import importlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from torch.distributed import TCPStore

from shoal.cli.main import main
from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch.nodes import exchange, meeting
from shoal.launch.nodes import train as nodes_train
from shoal.launch.nodes.count import NodeCount, node_name
from shoal.launch.nodes.exchange import Follower
from shoal.launch.nodes.last_reports import Leader
from shoal.launch.nodes.meeting import LeaderLost, MeetingPoint, new_meeting_point
from shoal.launch.nodes.messages import Announcement, End, Round, Status
from shoal.launch.nodes.watched_ranks import EveryRank, RankReporter
from shoal.launch.rendezvous import connect, open_store
from shoal.launch.report import FAILED, STOPPED, Report
from shoal.launch.signals import STOP_SIGNALS, stoppable
from shoal.observe.flight_recorder import Channel, FlightEntry, Snapshot
from shoal.parallel.signed_store import SignedStore
from shoal.plan.refit import refit
from shoal.plan.resolve import resolve
from shoal.train.guard.stacks import Frame, Standing
from shoal.train.run_directory import RunDirectory

TIMEOUT = 4.0  # a launcher is lost after half of it


def status(name: str, process: int = 1) -> Status:
    return Status(name=name, host="here", process=process, devices=2)


class Meeting:
    """A leader and those who follow it, in one process."""

    def __init__(self) -> None:
        self.store, self.address, self.port = open_store("127.0.0.1", TIMEOUT)
        self.leader = Leader(connect(self.port, self.store.secret, TIMEOUT), status("a"), TIMEOUT)
        self.leader.start()
        self.talking = [self.leader]

    def connect(self) -> SignedStore:
        return connect(self.port, self.store.secret, TIMEOUT)

    def join(self, name: str, process: int = 2) -> Follower:
        follower = Follower(self.connect(), status(name, process), TIMEOUT)
        follower.start()
        self.talking.append(follower)
        return follower

    def hears(self, condition: object, seconds: float = 10.0) -> bool:
        return self.leader.wait(condition, seconds)


@pytest.fixture
def together() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    for one in made.talking:
        one.close()


def test_what_is_said_is_heard_and_who_is_silent_is_lost(together: Meeting) -> None:
    leader, follower = together.leader, together.join("b")
    follower.say(ready=1)
    assert together.hears(lambda: [one.name for one in leader.alive().values()] == ["a", "b"])
    assert together.hears(lambda: leader.alive()[follower.number].ready == 1)
    round = Round(number=1, nodes=(1, 2), attempt="0a0a0a0a-1", layout="dp=2", cluster={})
    leader.command(round=round, end=End(message="over"))
    assert follower.wait(lambda: follower.call.end is not None, 10)
    assert follower.call.round is not None and follower.call.round.nodes == (leader.number, follower.number)
    assert follower.call.end == End(message="over", code=1) and not follower.lost

    follower.close()  # as if its node were gone
    assert together.hears(lambda: list(leader.alive()) == [leader.number])
    assert leader.silent_for(follower.number) >= leader.patience
    assert leader.name_of(follower.number) == "b"


def test_a_leader_that_does_not_answer_is_lost(together: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = together.join("b")
    assert follower.wait(lambda: follower.call.beat > 0, 10) and not follower.lost

    def hangs(self: Follower) -> None:
        time.sleep(60)

    monkeypatch.setattr(Follower, "_exchange", hangs)
    deadline = time.monotonic() + 10
    while not follower.lost:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_of_two_launchers_with_one_name_the_later_is_refused(together: Meeting) -> None:
    first, second = together.join("b", process=2), together.join("b", process=3)
    assert second.wait(lambda: bool(second.call.refused), 10)
    (number,) = second.call.refused
    assert number == second.number and "--node NAME" in second.call.refused[number]
    assert first.number in together.leader.alive() and number not in together.leader.alive()
    # One that has lost the leader and has found it again is not another.
    again = together.join("b", process=2)
    assert together.hears(lambda: again.number in together.leader.alive())
    time.sleep(0.5)
    assert again.number not in together.leader.call.refused


def test_who_would_train_something_else_is_refused_and_the_others_go_on(together: Meeting) -> None:
    leader, good = together.leader, together.join("b")
    other = Follower(together.connect(), status("c").model_copy(update={"facts": {"data": "1"}}), TIMEOUT)
    other.start()
    together.talking.append(other)
    assert other.wait(lambda: other.number in other.call.refused, 10)
    assert other.call.refused[other.number] == "node c differs from node a, which leads, in data"
    # One that says what nobody here understands, for it is of another version.
    store = together.connect()
    number = exchange._join(store, status("d"))
    store.set(exchange.node_key(number), json.dumps({**status("d").model_dump(), "mood": "good"}))
    assert together.hears(lambda: "not the same version" in leader.call.refused.get(number, ""))
    assert together.hears(lambda: list(leader.alive()) == [leader.number, good.number]) and not leader.broken


def test_a_stranger_neither_joins_nor_holds_up_nor_turns_back_time(together: Meeting) -> None:
    """Another user of the machine, who can write to the store but has no secret."""
    stranger = TCPStore("127.0.0.1", together.port, is_master=False)
    stranger.add("nodes", 10**9)
    stranger.set("node-2", status("x").model_dump_json())
    stranger.set("node-3", b"\xff")
    leader, follower = together.leader, together.join("b")
    assert follower.number == 2  # what is not ours is free
    follower.say(ready=1)
    assert together.hears(lambda: follower.number in leader.alive() and leader.alive()[2].ready == 1)
    assert [one.name for one in leader.alive().values()] == ["a", "b"] and not leader.call.refused
    # What was said before is not heard again, and orders are the leader's own.
    before = stranger.get("node-2")
    follower.say(ready=7)
    assert together.hears(lambda: leader.alive()[2].ready == 7)
    order = Announcement(beat=10**6, end=End(message="over"))
    for _ in range(3):
        stranger.set("node-2", before)
        stranger.set("node-4", b"0" * 64)
        stranger.set(exchange.CALL, order.model_dump_json())
        beat = leader.call.beat
        assert together.hears(lambda beat=beat: leader.call.beat > beat)
        assert leader.alive()[2].ready == 7 and follower.call.end is None
    assert not leader.broken and not follower.lost
    later = together.join("c", 3)
    assert together.hears(lambda: later.number in leader.alive())


def test_a_leader_whose_orders_are_taken_away_is_lost(
    together: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loudly, and soon: a follower does not wait for an order that it cannot get."""
    follower = together.join("b")
    assert follower.wait(lambda: follower.call.beat > 0, 10) and not follower.lost
    monkeypatch.setattr(Leader, "_exchange", lambda self: self.store.plain.delete_key(exchange.CALL))
    deadline = time.monotonic() + 20
    while not follower.lost:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_only_its_owner_can_read_where_the_leader_is(tmp_path: Path) -> None:
    store, address, port = open_store("127.0.0.1", TIMEOUT)
    place = new_meeting_point(address, port, store)
    before = os.umask(0)
    try:
        place.write(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".meeting").stat().st_mode) == 0o600
    assert place.secret == store.secret.hex() and place.secret not in repr(place)


class Attempt:
    """One that is asked to stop, and then finds its leader lost."""

    asked = 0.0

    def on_signal(self, number: int, frame: object = None) -> None:
        self.asked = time.monotonic()

    def run_to_end(self) -> Report:
        with stoppable(self.on_signal, STOP_SIGNALS):
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.asked:
                time.sleep(0.01)
        raise LeaderLost


def test_a_stop_is_not_forgotten_where_the_leader_is_lost(
    settings: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolve(load(None, settings(cluster__on="2xcpu"), "dp=2").config)
    run = RunDirectory(tmp_path / "run", "b")
    followed: list[int] = []

    def follow(self: nodes_train._Together) -> Report | None:
        followed.append(1)
        assert len(followed) == 1, "it looks for another leader although it was asked to stop"
        return self._run(Attempt)

    monkeypatch.setattr(nodes_train._Together, "follow", follow)
    with run.held():  # somebody else leads
        report = nodes_train.train(job, run, NodeCount(2, 2), False, Console(quiet=True))
    assert report.code == STOPPED and followed == [1]


def test_nodes_that_do_not_come_stop_the_run_and_do_not_fail_it(
    settings: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever places nodes may have one in an hour: it starts again what exits with 75."""
    leader = importlib.import_module("shoal.launch.nodes.leader")
    monkeypatch.setattr(leader, "JOIN_SECONDS", 0.5)
    config = load(None, settings(cluster__on="2x1xcpu", cluster__interface="lo"), "dp=2").config
    report = nodes_train.train(
        resolve(config, None, 2),
        RunDirectory(tmp_path / "run", "a"),
        NodeCount(2, 2),
        False,
        Console(quiet=True),
    )
    assert report.code == STOPPED
    assert report.message.startswith("2 nodes did not join within 0 s; joined: a; nothing has been committed")
    assert "run the same command" in report.message


def test_a_stop_while_an_attempt_is_being_made_reaches_it(tmp_path: Path) -> None:
    """The signals are not its own yet."""
    run = RunDirectory(tmp_path / "run", "b")
    together = nodes_train._Together(None, run, NodeCount(2, 2), Console(quiet=True), None, "", None)

    class Slow(Attempt):
        def __init__(self) -> None:
            together.on_signal(signal.SIGTERM)

        def run_to_end(self) -> Report:
            return Report(STOPPED if self.asked else FAILED, run.path, 0, "", None, None)

    report = together._run(Slow)
    assert report is not None and report.code == STOPPED


def test_the_leader_is_found_through_the_run_and_a_stranger_is_not_taken_for_it(tmp_path: Path) -> None:
    assert MeetingPoint.read(tmp_path) is None
    store, address, port = open_store("127.0.0.1", TIMEOUT)
    place = new_meeting_point(address, port, store)
    place.write(tmp_path)
    found = MeetingPoint.read(tmp_path)
    assert found == place and not found.elsewhere and found.connect() is not None
    # Somebody else has got the port.
    store.plain.set(meeting.HELLO, "another")
    assert place.connect() is None
    MeetingPoint(address, port, "here", "of another").remove(tmp_path)
    assert place.stands(tmp_path)
    place.remove(tmp_path)
    assert MeetingPoint.read(tmp_path) is None and MeetingPoint(address, 1, "here", "00").connect() is None
    assert MeetingPoint("127.0.0.1", port, "another host", "00").elsewhere


class Ranks:
    """Two ranks as a launcher sees them."""

    def __init__(self, first: int) -> None:
        self.readers = {first: None, first + 1: None}
        channel = Channel("7", "dp", (0, 1, 2, 3))
        entries = tuple(
            FlightEntry(channel, number, "all_reduce", 8, 0.0, "loop.py:1") for number in range(1, 30)
        )
        self.seen = [Snapshot(first + rank, 1, 7, "step", 3, {channel: 29}, entries) for rank in (0, 1)]

    def look(self, entries: bool = False) -> list[Snapshot] | None:
        return self.seen

    def any_stopped(self) -> bool:
        return False

    def evidence(self, snapshots: list[Snapshot], patience: float) -> dict[int, Standing]:
        return {
            rank: Standing((Frame("loop.py", rank, "wait"),), rank == 3, False, "S") for rank in self.readers
        }


def test_the_leader_sees_the_ranks_of_other_nodes(together: Meeting) -> None:
    leader, follower = together.leader, together.join("b")
    round = Round(
        number=3, nodes=(leader.number, follower.number), attempt="0a0a0a0a-3", layout="dp=4", cluster={}
    )
    every = EveryRank(leader, round, Ranks(0))
    assert every.look() is None  # of the other nothing is known yet
    witness = RankReporter(Ranks(2), patience=0.1, asked=0)
    follower.say(round=3, **witness.tell(0))
    assert together.hears(lambda: every.look() is not None)
    seen = every.look(entries=True)
    assert seen is not None and [one.pid for one in seen] == [0, 1, 2, 3]
    assert seen[3].counts == Ranks(2).seen[1].counts and seen[3].entries == Ranks(2).seen[1].entries[-16:]

    def answer() -> None:
        assert follower.wait(lambda: follower.call.ask == 1, 10)
        follower.say(**witness.tell(1))

    import threading

    thread = threading.Thread(target=answer)
    thread.start()
    standings = every.evidence(seen, 0.1)
    thread.join()
    assert standings[3].stopped and not standings[2].stopped
    assert str(standings[2]) == str(Ranks(2).evidence([], 0.1)[2])
    follower.say(round=4, seen={})  # of another round
    assert together.hears(lambda: every.look() is None)


def test_ranks_that_wait_have_nothing_new_to_tell() -> None:
    """Hearts beat, and some time is always spent waiting for a processor: thousands would tell of it at all times."""
    ranks = Ranks(2)
    witness = RankReporter(ranks, patience=0.1, asked=0, quarter=60.0)
    told = witness.tell(0)
    ranks.seen = [replace(one, beats=one.beats + 1, starved=0.09) for one in ranks.seen]
    assert witness.tell(0) == told
    ranks.seen = [replace(one, starved=0.11) for one in ranks.seen]
    assert witness.tell(0) != told


def test_documents_are_json_and_strangers_are_refused() -> None:
    told = status("a").model_copy(update={"standings": {1: asdict(Standing())}}).model_dump_json()
    assert Status.model_validate_json(told).standings[1] == json.loads(json.dumps(asdict(Standing())))
    with pytest.raises(ValueError, match="Extra inputs"):
        Announcement.model_validate_json('{"command": "rm"}')


def test_how_many_nodes() -> None:
    assert NodeCount.parse("2") == (2, 2) and NodeCount.parse("1:3") == (1, 3)
    assert [str(NodeCount(2, 2)), str(NodeCount(1, 2))] == ["2", "1:2"]
    for text in ("0", "3:2", "two", "1:2:3", ""):
        with pytest.raises(BadInput, match="--nodes"):
            NodeCount.parse(text)
    assert node_name("a-1") == "a-1" and node_name(None)
    for text in ("../a", "", "a b", "-a"):
        with pytest.raises(BadInput, match="--node"):
            node_name(text)


def test_bad_input_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for options, words in (
        (["--nodes", "many"], "--nodes many"),
        (["--nodes", "2", "--node", "a/b"], "--node a/b"),
        (["--nodes", "3", "--layout", "dp=4", "--set", "cluster.on=4xcpu"], "4 ranks, which are not as many"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", "--run", str(run), *options])
        assert ended.value.code == 2 and words in capfd.readouterr().err and not run.exists()


def test_a_leader_that_only_its_own_host_can_reach_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Held by this process, as if by another node's."""
    run = RunDirectory(tmp_path / "run")
    with run.held():
        MeetingPoint("127.0.0.1", 1, f"not-{os.uname().nodename}", "").write(run.path)
        with pytest.raises(SystemExit) as ended:
            main(["train", "--run", str(run.path), "--nodes", "2", "--node", "b", "--layout", "dp=2"])
    assert ended.value.code == 2
    assert "--set cluster.interface=eth0" in capfd.readouterr().err


def test_on_fewer_nodes_the_planner_lays_it_out_anew() -> None:
    def job(on: str, layout: str):
        settings = ["model.preset=llama3-8b", "recipe.seq=8192", "recipe.batch=64", f"cluster.on={on}"]
        return resolve(load(None, settings, layout).config)

    three = refit(job("4x8xH100", "fsdp=32"), 24, 3)
    # 64 sequences do not divide over three nodes: two of them take part.
    assert (three.cluster.nodes, three.cluster.devices_per_node, three.layout.world) == (2, 8, 16)
    assert refit(job("4x8xH100", "fsdp=32"), 8, 1).layout.world == 8
