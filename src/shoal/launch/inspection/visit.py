"""The protocol behind ``shoal doctor --cluster``: one process per node reports on it, and examines others.

The first node asks and compares. All waits have time limits, so a node that does not come, or goes silent, is named and
holds nothing up.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.facts.cluster import Cluster
from shoal.launch.adopt.launched_rank import LaunchedRank
from shoal.launch.adopt.rank_rendezvous import PART_SECONDS, RankRendezvous
from shoal.launch.inspection.compare import ClusterCheck, Inspected, Seen, compare
from shoal.launch.inspection.links import PATIENCE, LinkPlan, measure_links, measured
from shoal.launch.inspection.node import NodeReport, report
from shoal.launch.inspection.pairs import partners, rounds
from shoal.launch.interfaces import LOOPBACK, address_of, address_towards, interface_towards

# The longest silence of a node that has joined. Its own doctor takes longest: torch has to be imported.
TALK_SECONDS = 180.0
# Time for another node's file to become visible, and for a connection to be made.
SEE_SECONDS, REACH_SECONDS = 5.0, 5.0
# Of several clock readings the fastest counts; the first wakes a node up.
QUESTIONS = 4
MARK = ".shoal-doctor-"


@dataclass(frozen=True)
class Visit:
    """The settings from the command line."""

    told: LaunchedRank
    name: str
    names: dict[int, str]  # names of all nodes, if a scheduler gives them
    run: Path
    interface: str | None
    shared: bool
    wait: float
    visible: str | None
    catalogue: Cluster | None  # cluster whose link speeds are expected; None: those of this machine's devices


def inspect(visit: Visit) -> list[ClusterCheck] | bool:
    """Returns all checks on the first node; on others, and for further ranks of a node, whether all is well."""
    told = visit.told
    call = RankRendezvous(told, TALK_SECONDS, visit.wait)
    try:
        if told.local_rank != 0:
            return _Guest(visit, call).to_end()
        with _listening(_address(visit)) as (address, port):
            mine, here = report(visit.name, address, port, visit.run, visit.visible)
            call.store.set(f"node-{told.node}", json.dumps(asdict(mine)))
            if told.rank == 0:
                return _Host(visit, call, mine, here).compared()
            return _Guest(visit, call).to_end()
    finally:
        _part(call)


def _address(visit: Visit) -> str:
    if visit.interface is not None:
        return address_of(visit.interface)
    return (address_towards(visit.told.host) if visit.told.nodes > 1 else None) or LOOPBACK


@contextmanager
def _listening(address: str) -> Iterator[tuple[str, int]]:
    """A port that others can connect to while this runs."""
    with socket.create_server((address, 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=answer, name="shoal-port", daemon=True).start()
        yield address, server.getsockname()[1]


def _part(call: RankRendezvous) -> None:
    """The store goes away with the first rank, so it waits until the others have read the final message."""
    with suppress(RuntimeError):
        if not call.hosts:
            call.store.set(f"left-{call.told.rank}", "")
        else:
            others = [f"left-{rank}" for rank in range(1, call.told.world)]
            call.store.wait_for(others, timedelta(seconds=PART_SECONDS))


class _Guest:
    """A node's part: look when asked, measure when asked, receive the result."""

    def __init__(self, visit: Visit, call: RankRendezvous) -> None:
        self.visit, self.told, self.store = visit, visit.told, call.store
        self.patience = timedelta(seconds=visit.wait + TALK_SECONDS)

    def to_end(self) -> bool:
        if self.told.local_rank == 0:
            self._tell_time()
            self._look()
        self._measure(json.loads(self._hear("links")))
        return bool(json.loads(self._hear("well")))

    def _hear(self, key: str) -> str:
        return self.store.wait(key, self.patience)

    def _tell_time(self) -> None:
        for number in range(QUESTIONS):
            key = f"clock-{self.told.node}-{number}"
            self._hear(f"{key}-asked")
            self.store.set(key, str(time.time()))

    def _look(self) -> None:
        asked = json.loads(self._hear("look"))
        if self.told.node not in asked["nodes"]:
            return
        seen = Seen()
        if asked["token"]:
            seen.shared, seen.locked = _see(self.visit.run / asked["token"], self.visit.name)
        for other in partners([[tuple(pair) for pair in pairs] for pairs in asked["rounds"]], self.told.node):
            if other is not None:
                address, port = asked["places"][str(other)]
                if why := _reach(address, port):
                    seen.unreached[str(other)] = why
        self.store.set(f"seen-{self.told.node}", json.dumps(asdict(seen)))

    def _measure(self, words: dict[str, Any]) -> None:
        """Start one process per device, unless a launcher has started them."""
        plan = LinkPlan(**words)
        if self.told.node not in plan.nodes:
            return
        node, local = self.told.node, self.told.local_rank
        if self.told.local_world == 1:
            found = dict(enumerate(measured(plan, node)))
        elif local < plan.devices:
            place = (plan.host, plan.port)
            store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=PATIENCE))
            found = {local: measure_links(store, plan, node, local)}
        else:
            found = {}
        for device, figures in found.items():
            self.store.set(f"figures-{node}-{device}", json.dumps(figures))


class _Host(_Guest):
    """The first node: asks all others, answers as they do, and compares."""

    def __init__(self, visit: Visit, call: RankRendezvous, mine: NodeReport, here: Cluster) -> None:
        super().__init__(visit, call)
        self.catalogue = visit.catalogue or here
        self.heard = Inspected(visit.told.nodes, {0: mine}, names=visit.names)

    def compared(self) -> list[ClusterCheck]:
        deadline = time.monotonic() + self.visit.wait + TALK_SECONDS / 2
        for node in range(1, self.told.nodes):
            if (text := self._answer(f"node-{node}", deadline)) is not None:
                self.heard.reports[node] = NodeReport(**json.loads(text))
        nodes = [*self.heard.reports]
        self._ask_clocks(nodes)
        matches = rounds(nodes)
        self._ask_to_look(nodes, matches)
        self._ask_to_measure(nodes, matches)
        inside = (self.catalogue.fast or self.catalogue.device.host_link).bandwidth
        checks = compare(self.heard, self.visit.shared, inside, self.catalogue.network.bandwidth)
        self.store.set("well", json.dumps(all(check.status != "failed" for check in checks)))
        return checks

    def _answer(self, key: str, deadline: float) -> str | None:
        try:
            return self.store.wait(key, timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except dist.DistStoreError:
            return None

    def _ask_clocks(self, nodes: list[int]) -> None:
        self.heard.offsets[0] = (0.0, 0.0)
        for node in nodes[1:]:
            best: tuple[float, float] | None = None
            for number in range(QUESTIONS):
                key = f"clock-{node}-{number}"
                began = time.time()
                self.store.set(f"{key}-asked", "")
                text = self._answer(key, time.monotonic() + REACH_SECONDS)
                if text is None:
                    break
                took = time.time() - began
                if best is None or took / 2 < best[1]:
                    best = (float(text) - began - took / 2, took / 2)
            if best is not None:
                self.heard.offsets[node] = best

    def _ask_to_look(self, nodes: list[int], matches: list[Any]) -> None:
        places = {str(node): (one.address, one.port) for node, one in self.heard.reports.items()}
        with _token(self.visit.run if self.visit.shared else None) as token:
            asked = {"nodes": nodes, "rounds": matches, "places": places, "token": token}
            self.store.set("look", json.dumps(asked))
            self._look()
            deadline = time.monotonic() + TALK_SECONDS
            for node in nodes:
                if (text := self._answer(f"seen-{node}", deadline)) is not None:
                    self.heard.seen[node] = Seen(**json.loads(text))

    def _ask_to_measure(self, nodes: list[int], matches: list[Any]) -> None:
        """Only nodes that reach all their partners measure: others would be waited for."""
        cut = {node for node, seen in self.heard.seen.items() if seen.unreached}
        cut |= {int(other) for seen in self.heard.seen.values() for other in seen.unreached}
        fit = [node for node in nodes if node in self.heard.seen and node not in cut]
        devices = min(max(1, self.heard.reports[node].devices) for node in fit) if fit else 1
        if self.told.local_world > 1:
            devices = min(devices, self.told.local_world)
        on_gpus = bool(fit) and all(self.heard.reports[node].devices for node in fit)
        interface = self.visit.interface or interface_towards(self.told.host)
        plan = LinkPlan(
            host=self.told.host,
            port=self.told.port,
            nodes=fit,
            devices=devices,
            backend="nccl" if on_gpus else "gloo",
            rounds=[list(map(list, pairs)) for pairs in rounds(fit)],
            interface=interface
            if interface is not None and len(nodes) > 1
            else interface_towards(LOOPBACK) or "",
        )
        self.store.set("links", json.dumps(asdict(plan)))
        self._measure(asdict(plan))
        deadline = time.monotonic() + (2 + len(plan.rounds)) * 2 * PATIENCE
        for node in fit:
            texts = [self._answer(f"figures-{node}-{device}", deadline) for device in range(devices)]
            self.heard.links[node] = [json.loads(text) for text in texts if text is not None]


@contextmanager
def _token(run: Path | None) -> Iterator[str]:
    """A locked file at the run's location, which other nodes look for. Leaves nothing behind."""
    if run is None:
        yield ""
        return
    made: list[Path] = []
    home = run.absolute()
    while not home.exists():
        made.append(home)
        home = home.parent
    path = run.absolute() / f"{MARK}{secrets.token_hex(8)}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield path.name
    except OSError:  # its own doctor reports that
        yield path.name
    finally:
        path.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _see(path: Path, name: str) -> tuple[str, bool]:
    """Why another node's file is not visible here, and whether its lock is effective."""
    deadline = time.monotonic() + SEE_SECONDS
    while True:
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208 a look that makes NFS ask its server
        try:
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return "", True
                return "", False
        except OSError as error:
            if time.monotonic() > deadline:
                return (
                    f"node {name} does not see what the first node has written to {path.parent}: {error.strerror}",
                    True,
                )
            time.sleep(0.2)


def _reach(address: str, port: int) -> str:
    """Why a node's port cannot be reached from here."""
    try:
        socket.create_connection((address, port), REACH_SECONDS).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return ""
