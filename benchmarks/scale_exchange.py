"""What an exchange of thousands of launchers costs: the leader's own code, and followers without ranks or machines.

The followers are real (``Follower``: it joins, says, hears), many of them in each of a few processes, which let them
exchange once whenever they are told to. Their ranks are synthetic: what a flight recorder would show. Idle connections
stand for those that ranks hold to the leader's store. The leader is alone in its process with the store, so the
processor time of that process is what an exchange costs it, the store's thread included.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shoal.launch.nodes import last_reports, relay
from shoal.launch.nodes.exchange import Follower, silence, tick_of
from shoal.launch.nodes.last_reports import Leader
from shoal.launch.nodes.messages import Round, Status
from shoal.launch.nodes.relay import RelayLink
from shoal.launch.nodes.watched_ranks import EveryRank, RankReporter
from shoal.launch.rendezvous import connect, open_store
from shoal.observe import flight_recorder
from shoal.observe.flight_recorder import Channel, FlightEntry, Snapshot
from shoal.parallel.signed_store import SignedStore
from shoal.train.guard.stacks import Standing
from shoal.train.guard.watchdog import LOOK_SECONDS, Limits, Watchdog

TIMEOUT = 60.0
# Between two exchanges, and until a launcher is lost: as long as it takes to simulate thousands on a few cores.
TICK, PATIENCE = 60.0, 3600.0
ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 4
# Exchanges until all who have a head have found it.
SETTLE = 20
A_NODE = 8  # ranks
# No verdict before one is wanted.
UNHURRIED = Limits(1e4, 1e4)


@cache
def _ranks(first: int, stop: int, step: int) -> tuple[int, ...]:
    return tuple(range(first, stop, step))


@cache
def _channels(rank: int, world: int, groups: int) -> list[Channel]:
    """Groups of the world, of a node, across nodes and across pipelines."""
    node, apart = rank // A_NODE * A_NODE, max(1, world // groups)
    named = {
        "world": _ranks(0, world, 1),
        "tp": _ranks(node, min(node + A_NODE, world), 1),
        "fsdp": _ranks(rank % A_NODE, world, A_NODE),
        "pp": _ranks(rank % apart, world, apart),
    }
    found = [Channel(f"{name}-{ranks[0]}", name, ranks) for name, ranks in named.items() if len(ranks) > 1]
    # As a recorder is read: of a group there is one object, in this process.
    return [flight_recorder._channel(one.as_json()) for one in found]


class SyntheticNode:
    """The ranks of one node as their recorders show them, in groups of the world, of pipelines and of shards."""

    def __init__(self, first: int, world: int, groups: int = 16) -> None:
        self.first, self.world, self.groups = first, world, groups
        self.readers = dict.fromkeys(range(first, min(first + A_NODE, world)))
        self.steps, self.late, self.looks = 1, -1, 0

    def look(self, entries: bool = False) -> list[Snapshot] | None:
        seen = []
        self.looks += 1
        for rank in self.readers:
            done = self.steps - (rank == self.late)
            counts = dict.fromkeys(_channels(rank, self.world, self.groups), 10 * done)
            last = tuple(
                FlightEntry(channel, count - back, "all_reduce", 4096, 0.0, "src/shoal/train/step.py:145")
                for back in range(4)
                for channel, count in counts.items()
            )
            # A heart beats and a processor is waited for, whatever else happens.
            alive = {"beats": self.looks, "starved": 1e-4 * self.looks}
            snapshot = Snapshot(1000 + rank, 1, done, "step", 0, counts, last if entries else ())
            seen.append(replace(snapshot, **alive))
        return seen

    def progressing(self) -> bool:
        return False

    def any_stopped(self) -> bool:
        return False

    def evidence(self, snapshots: Sequence[Snapshot], patience: float) -> dict[int, Standing]:
        return {rank: Standing() for rank in self.readers}


def status(number: int) -> Status:
    facts = dict.fromkeys(("run", "model", "data", "recipe", "checkpoint", "fault"), "0123456789abcdef")
    return Status(name=f"node-{number}", host=f"host-{number}", process=number, devices=A_NODE, facts=facts)


def follow(port: int, secret: str, first: int, count: int, world: int, sockets: int) -> None:
    """A process with so many followers, each on a thread of its own only in life: here one after another."""
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(sockets)]
    # Here they take turns: none has a thread, and the pace is that of this machine and not theirs.
    RelayLink.start = lambda self: None  # type: ignore[method-assign]
    relay.CONNECT_SECONDS = TIMEOUT
    followers, reporters = [], []
    began = time.perf_counter()
    for node in range(first, first + count):
        store = connect(port, bytes.fromhex(secret), TIMEOUT)
        followers.append(Follower(store, status(node), TIMEOUT))
        followers[-1].patience = PATIENCE
        reporters.append(RankReporter(SyntheticNode(node * A_NODE, world), 1.0, 0, 0.2, world))  # type: ignore[arg-type]
    _answer(
        {
            "joined_s": time.perf_counter() - began,
            "sockets": len(idle),
            "numbers": [one.number for one in followers],
        }
    )
    for line in sys.stdin:
        order = json.loads(line)
        for follower, reporter in zip(followers, reporters, strict=True):
            local: Any = reporter.local
            local.steps, local.late = order["steps"], order["late"]
            if order["tell"]:
                follower.say(round=1, **reporter.tell(follower.call.ask, follower.call.details))
            follower.turn()
            if follower.link is not None:
                follower.link.turn()
        _answer({"lost": sum(follower.lost for follower in followers)})


def _answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


class Meeting:
    """A leader, and followers elsewhere."""

    def __init__(self, nodes: int, world: int, sockets: int = 0) -> None:
        store, _, port = open_store("127.0.0.1", TIMEOUT)
        self.store: SignedStore = store
        self.nodes, self.world, self.steps = nodes, world, 1
        self.leader = Leader(connect(port, store.secret, TIMEOUT), status(0), TIMEOUT)
        self.leader.patience = PATIENCE
        last_reports.tick_of = lambda nodes, patience: TICK
        self.processes = []
        self.numbers: list[int] = []
        share = -(-(nodes - 1) // PROCESSES) if nodes > 1 else 0
        for first in range(1, nodes, share or 1):
            count = min(share, nodes - first)
            idle = sockets * count // max(1, nodes - 1)
            call = f"follow({port}, {store.secret.hex()!r}, {first}, {count}, {world}, {idle})"
            code = f"from benchmarks.scale_exchange import follow; {call}"
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        # In the order of their numbers: which node has which ranks is said in a round.
        for process in self.processes:
            self.numbers += self._heard(process)["numbers"]

    def exchange(self, tell: bool = True, late: int = -1, progress: bool = True) -> float:
        """All followers once, and the leader; what it cost the leader's process, in seconds of a processor."""
        self.steps += progress
        order = json.dumps({"steps": self.steps, "late": late, "tell": tell}) + "\n"
        began = time.process_time()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(order)
            process.stdin.flush()
        for process in self.processes:
            assert self._heard(process)["lost"] == 0
        self.leader.turn()
        return time.process_time() - began

    @staticmethod
    def _heard(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return found

    def close(self) -> None:
        last_reports.tick_of = tick_of
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def measured(nodes: int, world: int, exchanges: int = 20, sockets: int = 0) -> dict[str, float]:
    """Exchanges while all is well; and with one rank that others wait for, until the watchdog names it."""
    began = time.perf_counter()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gathered = Meeting(nodes, world, sockets)
    leader = gathered.leader
    try:
        while len(leader.alive()) < nodes:
            gathered.exchange()
        joined = time.perf_counter() - began
        in_order = (leader.number, *gathered.numbers)
        attempt = Round(number=1, nodes=in_order, attempt="0a0a0a0a-1", layout=f"dp={world}", cluster={})
        mine = SyntheticNode(0, world)
        ranks = EveryRank(leader, attempt, mine, 0.2, world)  # type: ignore[arg-type]
        leader.command(round=attempt)
        watchdog = Watchdog(ranks, UNHURRIED)
        for _ in range(SETTLE):
            mine.steps = gathered.steps + 1
            gathered.exchange()
        costs, looks = [], []
        for _ in range(exchanges):
            mine.steps = gathered.steps + 1
            costs.append(gathered.exchange())
            looks.append(_look(watchdog, expect=False)[0])
        found = {
            "exchange_cpu_ms": round_ms(costs),
            "watch_cpu_ms": round_ms(looks),
            "messages_of_a_follower": 3,
            "tick_s": tick_of(nodes, silence(TIMEOUT)),
            "join_s": round(joined, 2),
        }
        mine.steps, gathered.steps = mine.steps + 1, gathered.steps + 1
        mine.late = world - 1
        found |= _waited_for(gathered, watchdog, ranks, world - 1, exchanges)
        assert found["named"] == world - 1, f"rank {world - 1} is late, and rank {found['named']} was named"
        return found
    finally:
        gathered.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _waited_for(
    meeting: Meeting, watchdog: Watchdog, ranks: EveryRank, late: int, exchanges: int
) -> dict[str, Any]:
    """Every rank waits for one: once all are asked what they see; then an exchange, as often as its ranks are looked at
    meanwhile; and in the end who it is.
    """
    began = time.process_time()
    deadline = time.monotonic() + 900
    while not (meeting.leader.call.details and ranks.look()) and time.monotonic() < deadline:
        meeting.exchange(late=late, progress=False)
        watchdog.poll()
    asked = time.process_time() - began
    costs, looks = [], []
    for _ in range(exchanges):
        costs.append(meeting.exchange(late=late, progress=False))
        looks.append(_look(watchdog, expect=False)[0])
    watchdog.limits = Limits(0.5, 5.0)
    named = _named(meeting, watchdog, late)
    pace = max(tick_of(meeting.nodes, silence(TIMEOUT)) / LOOK_SECONDS, 1.0)
    return {
        "late_exchange_cpu_ms": round(round_ms(costs) + pace * round_ms(looks), 2),
        "late_look_cpu_ms": round_ms(looks),
        "late_asked_once_cpu_ms": round(1000 * asked, 1),
        "named": named,
    }


def _named(meeting: Meeting, watchdog: Watchdog, late: int) -> int | None:
    """The rank that others wait for, as the watchdog says while launchers talk."""
    over = threading.Event()

    def talk() -> None:
        while not over.is_set():
            meeting.exchange(late=late, progress=False)

    thread = threading.Thread(target=talk)
    thread.start()
    verdict, deadline = None, time.monotonic() + 900
    try:
        while verdict is None and time.monotonic() < deadline:
            verdict = watchdog.poll()
            time.sleep(0.05)
    finally:
        over.set()
        thread.join()
    return None if verdict is None else verdict.rank


def _look(watchdog: Watchdog, expect: bool | None) -> tuple[float, int | None]:
    watchdog._looked -= 1.0  # as if a look were due
    began = time.process_time()
    verdict = watchdog.poll()
    assert expect is None or verdict is None
    return time.process_time() - began, None if verdict is None else verdict.rank


def round_ms(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return round(1000 * sorted(seconds)[len(seconds) // 2], 2)
