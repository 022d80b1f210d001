"""Nodes for tests: launchers of their own on this machine, which can be lost with all that runs on them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docs.shown import put, words_of

from shoal.observe.flight_recorder import FlightReader
from shoal.train.files import read_rows
from shoal.train.guard.processes import descendants, send
from shoal.train.run_directory import RunDirectory

# On a busy machine the start of a launcher alone may take minutes.
SECONDS = 300.0


class Node:
    """``shoal train --nodes`` on one of several nodes."""

    def __init__(self, name: str, run: Path, command: list[str], prefix: list[str] | None = None) -> None:
        self.name, self.run = name, RunDirectory(run, name)
        self.log = run.with_name(f"{name}.log")
        self.command, self.prefix = command, prefix or []
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "shoal", "train", *self.command, "--node", self.name],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """To all of its processes."""
        send([self.process.pid, *descendants(self.process.pid)], number)

    def lose(self) -> None:
        """With its memory."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.run.memory().path, ignore_errors=True)

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def code(self) -> int:
        return self.process.wait(timeout=SECONDS)


class Nodes:
    """Those of one run."""

    def __init__(self, run: Path, count: str, layout: str, settings: list[str]) -> None:
        self.run = RunDirectory(run)
        sets = [word for value in settings for word in ("--set", value)]
        typed = words_of("docs/nodes.md", "shoal train")
        typed.remove("my-run.toml")  # all of it is in the settings
        interface = typed.index("cluster.interface=eth0")
        if any(value.startswith("cluster.interface=") for value in settings):
            del typed[interface - 1 : interface + 1]
        else:
            typed[interface] = "cluster.interface=lo"
        self.command = [*put(typed[2:], run=run, nodes=count, layout=layout), *sets]
        self.nodes: list[Node] = []

    def start(self, name: str, **more: Any) -> Node:
        node = Node(name, self.run.path, self.command, **more)
        self.nodes.append(node)
        return node

    def end(self) -> None:
        for node in self.nodes:
            node.signal(signal.SIGCONT)
            node.signal(signal.SIGKILL)
            node.process.wait()

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run.metrics)

    def faults(self) -> list[dict[str, Any]]:
        return read_rows(self.run.faults)

    def step(self) -> int:
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else 0

    def rank(self, rank: int) -> int:
        """Its process: ranks record what they do on their own machine, which all of these nodes are on."""
        files = (node.run.flight(rank) for node in self.nodes)
        newest = max((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime)
        snapshot = FlightReader(newest).look()
        assert snapshot is not None
        return snapshot.pid

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            told = "\n".join(f"{node.name}: {node.words()[-2000:]}" for node in self.nodes)
            assert time.monotonic() < deadline, f"{what} did not happen\n{told}"
            time.sleep(0.02)

    def wait_for_steps(self, count: int, what: str = "progress") -> None:
        wanted = self.step() + count
        self.wait(lambda: self.step() >= wanted, what)

    def wait_for_world(self, world: int) -> None:
        def there() -> bool:
            rows = self.rows()
            return bool(rows) and rows[-1]["world"] == world

        self.wait(there, f"a world of {world}")

    def wait_for_fault(self, kind: str, count: int = 1) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [row for row in self.faults() if row["kind"] == kind]

        self.wait(lambda: len(found()) >= count, f"a fault called {kind}")
        return found()[count - 1]
