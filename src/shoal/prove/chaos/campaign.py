"""A campaign: a real run, faults injected one after the other, and the outcome of each. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.facts.layout import Layout
from shoal.prove.chaos.fault_kinds import BY_NAME, ENDS_LAUNCHER, RENAME, named_right
from shoal.prove.chaos.network import cut
from shoal.prove.chaos.orders import FaultOrder, Orders
from shoal.prove.chaos.schedule import Fault, nodes_for
from shoal.train.files import read_rows
from shoal.train.guard.processes import descendants, parent_of, send
from shoal.train.run_directory import ALONE, RunDirectory

LOOK_SECONDS = 0.01
# The campaign fails if a fault does not strike, or the run does not recover, in this time. Most of it is processor
# time: a launcher imports torch, which alone takes a minute or two on a busy machine.
PATIENCE = 600.0
# A fault that is not reported after this many later commits never will be.
TOLD_STEPS = 8
# Checkpoints on disk before one may be damaged.
COPIES = 2
# How long a network stays cut: longer than a campaign's collective timeout, because all ranks may be in the same
# collective.
CUT_SECONDS = 6.0
# How long a launcher stays stopped; or until its ranks, which continue, have done this many steps.
STOPPED_SECONDS, STOPPED_STEPS = 1.5, 20


class Broken(Exception):
    """The run did not survive, or a fault could not be injected."""


@dataclass
class InjectedFault:
    """A fault and its outcome. Times are seconds since it struck."""

    number: int
    kind: str
    point: str
    rank: int | None
    world: int
    layout: str
    step: int = 0
    time: float = 0.0
    committed: int = 0  # the last committed step at that time
    resumed: int | None = None  # the step that the run resumed from, if it was restarted
    detected_s: float | None = None
    recovered_s: float | None = None
    named_right: bool | None = None
    in_recovery: bool = False
    node: str = ""  # the node that was struck
    gone: int = 0  # committed steps of which the fault destroyed every copy
    spared: bool = False  # left alone, because there was no other copy to resume from
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class CampaignSettings:
    """What a campaign runs: the config with its changes, and the layouts that it cycles through."""

    config: Path | None
    settings: list[str]
    layouts: list[str]
    run: Path
    own_network: bool = False
    nodes: int = 1  # if a layout has equally many ranks for each


class Campaign:
    """Drives one run through its faults."""

    def __init__(
        self, setting: CampaignSettings, say: Callable[[InjectedFault], None] = lambda struck: None
    ) -> None:
        self.setting, self.say = setting, say
        self.run = RunDirectory(setting.run)
        self.orders = Orders(setting.run)
        self.struck: list[InjectedFault] = []
        self.launches = 0
        self._launchers: list[subprocess.Popen[bytes]] = []  # one per node

    def carry_out(self, faults: Sequence[Fault]) -> None:
        self.orders.prepare()
        try:
            self._launch()
            for fault in faults:
                self._wait_for_commit(self._committed())
                self._inject(fault)
            self._finish()
        finally:
            self._end()

    # Launching.

    @property
    def layout(self) -> str:
        return self.setting.layouts[(self.launches - 1) % len(self.setting.layouts)]

    @property
    def world(self) -> int:
        return Layout.parse(self.layout).world

    @property
    def nodes(self) -> list[str]:
        count = nodes_for(self.world, self.setting.nodes)
        return [f"n{index}" for index in range(count)] if count > 1 else [ALONE]

    def _launch(self) -> None:
        """Launch in the next layout, on all of its nodes."""
        self.launches += 1
        self._launchers = [self._launch_on(node) for node in self.nodes]

    def _launch_on(self, node: str) -> subprocess.Popen[bytes]:
        asked = {
            "config": str(self.setting.config) if self.setting.config else None,
            "settings": self.setting.settings,
            "layout": self.layout,
            "run": str(self.setting.run),
            "own_network": self.setting.own_network,
            "nodes": len(self.nodes),
            "node": node,
        }
        with self.orders.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "shoal.prove.chaos.launcher", json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _running(self) -> subprocess.Popen[bytes]:
        """The first node's launcher; all of them must be running."""
        for process in self._launchers:
            if process.poll() is not None:
                raise Broken(f"a launcher ended with status {process.returncode}: {self._last_words()}")
        return self._launchers[0]

    def _last_words(self) -> str:
        return " | ".join(self.orders.log.read_text(errors="replace").splitlines()[-4:])

    def _end(self, but: int = 0) -> None:
        """End the campaign's processes on every node, or on all ``but`` the first ones."""
        for process in self._launchers[but:]:
            if process.poll() is None:
                send([process.pid, *descendants(process.pid)], signal.SIGKILL)
                process.wait()

    def _finish(self) -> None:
        """Let the run finish."""
        self._running()
        for process in self._launchers:
            if process.wait(timeout=6 * PATIENCE) != 0:
                raise Broken(f"the run did not finish: {self._last_words()}")

    # Faults.

    def _inject(self, fault: Fault) -> None:
        before = len(self._fault_rows())
        records = [self._record(fault, in_recovery=False)]
        if fault.kind.target == "network":
            self._cut_network(records[0], before)
        elif fault.kind.target == "one node":
            self._strike_one_node(fault, records[0], before)
        elif fault.kind.target in ("launcher", "node"):
            self._strike_launcher(fault, records[0])
        else:
            if fault.second is not None and fault.second.kind.target == "checkpoint":
                self._wait_for_copies()
            orders = [self._order(fault, records[0])]
            if fault.second is not None:
                records.append(self._record(fault.second, in_recovery=True))
                orders.append(self._order(fault.second, records[1], after=records[0].number))
            # The second one first: it has to be in place when the run recovers, however soon that is.
            for order in reversed(orders):
                self.orders.give(order)
            for record, order in zip(records, orders, strict=True):
                self._wait_until_struck(record, order)
        told = self._wait_until_told(records, before)
        # Wait for the step that was struck, repeated or new, and whatever came to light later.
        self._wait_for_commit(max([told, *(record.step - 1 for record in records)]))
        recovered = time.time()
        rows = self._fault_rows()[before:]
        for record in records:
            self._look_again(record)
            record.recovered_s = recovered - record.time
            self._judge(record, rows)
            self.struck.append(record)
            self.say(record)

    def _record(self, fault: Fault, in_recovery: bool) -> InjectedFault:
        of_a_rank = fault.kind.target in ("rank", "checkpoint")
        rank = int(fault.rank * self.world) if of_a_rank else None
        if fault.point == RENAME and rank is not None:
            rank = 0  # the rank that commits
        number = len(self.struck) + int(in_recovery)
        return InjectedFault(
            number, fault.kind.name, fault.point, rank, self.world, self.layout, in_recovery=in_recovery
        )

    def _order(self, fault: Fault, record: InjectedFault, after: int | None = None) -> FaultOrder:
        assert record.rank is not None
        return FaultOrder(record.number, record.kind, record.rank, fault.point, fault.seed, after)

    def _wait_until_struck(self, record: InjectedFault, order: FaultOrder) -> None:
        for _ in self._patiently(f"{record.kind} of rank {record.rank} at {order.point} was not struck"):
            self._running()
            found = self.orders.strike_of(order.number)
            if found is not None:
                record.step, record.time = found["step"], found["time"]
                # As it was then: by now the run may have recovered and continued.
                record.committed = found["committed"]
                return

    def _wait_until_told(self, records: list[InjectedFault], before: int) -> int:
        """Wait for the report of each fault or, if it does not come, for some steps. Returns the last commit then."""
        last = max(max(record.step, record.committed) for record in records) + TOLD_STEPS
        for _ in self._patiently("the run reported no fault and made no progress"):
            if self._is_told(records, before) or self._committed() >= last:
                break
        return self._committed()

    def _is_told(self, records: list[InjectedFault], before: int) -> bool:
        told = {row["kind"] for row in self._fault_rows()[before:]}
        for record in records:
            self._look_again(record)
        wanted = [BY_NAME[record.kind].told for record in records if not record.spared]
        return all(not kinds or told.intersection(kinds) for kinds in wanted)

    def _look_again(self, record: InjectedFault) -> None:
        """Update the record with the result of a strike, which the struck process reports afterwards."""
        found = self.orders.strike_of(record.number) or {}
        record.gone, record.spared = found.get("gone", 0), found.get("spared", False)

    def _cut_network(self, record: InjectedFault, before: int) -> None:
        """Strike again if no rank could notice: ranks that are descheduled, or commit, do not wait for each other."""
        process = self._running()
        for _ in self._patiently("no cut of the network was noticed"):
            record.committed = self._committed()
            with cut(process.pid):
                record.step, record.time = self._committed() + 1, time.time()
                time.sleep(CUT_SECONDS)
            self._wait_until_told([record], before)
            if self._is_told([record], before):
                return

    def _strike_launcher(self, fault: Fault, record: InjectedFault) -> None:
        process = self._running()
        name = fault.kind.name.split()[1]
        processes = descendants(process.pid) if fault.kind.target == "node" else []
        record.committed, record.step = self._committed(), self._committed() + 1
        record.time = time.time()
        send([process.pid, *processes], signal.Signals[name])
        if fault.kind.name not in ENDS_LAUNCHER:
            until = time.monotonic() + STOPPED_SECONDS
            while time.monotonic() < until and self._committed() < record.step + STOPPED_STEPS:
                time.sleep(LOOK_SECONDS)
            process.send_signal(signal.SIGCONT)
            return
        asked = name in ("SIGTERM", "SIGUSR1") and fault.kind.target == "launcher"
        # A launcher asked to stop stops all nodes. No other launcher of the campaign may take its place.
        codes = [self._code_of(one) for one in (self._launchers if asked else [process])]
        self._end(but=1)
        if asked:
            record.named_right = codes == [75] * len(codes)
            if not record.named_right:
                raise Broken(f"asked to stop, the launchers ended with {codes}: {self._last_words()}")
        self._wait_until_gone(processes)
        self._launch()

    def _code_of(self, launcher: subprocess.Popen[bytes]) -> int:
        for _ in self._patiently("a launcher did not exit"):
            if (code := launcher.poll()) is not None:
                return code
        raise AssertionError

    def _strike_one_node(self, fault: Fault, record: InjectedFault, before: int) -> None:
        """Lose a node, with all of its processes and its memory, for a while."""
        self._running()
        stopped = fault.kind.name.endswith("SIGSTOP")
        led_by = self._leader()
        choice = [index for index in range(len(self.nodes)) if not stopped or index != led_by]
        index = choice[int(fault.rank * len(choice))]
        process, node = self._launchers[index], self.nodes[index]
        processes = [process.pid, *descendants(process.pid)]
        record.node = node
        record.committed, record.step = self._committed(), self._committed() + 1
        record.time = time.time()
        if stopped:
            send(processes, signal.SIGSTOP)
            self._wait_until_told([record], before)
            send(processes, signal.SIGCONT)
            return
        send(processes, signal.SIGKILL)
        process.wait()
        self._wait_until_gone(processes)
        shutil.rmtree(RunDirectory(self.setting.run, node).memory().path, ignore_errors=True)
        self._launchers[index] = self._launch_on(node)

    def _leader(self) -> int:
        """The node whose launcher holds the run; another one may be about to."""
        processes = [one.pid for one in self._launchers]
        for _ in self._patiently("no launcher leads the run"):
            with contextlib.suppress(OSError, ValueError):
                return processes.index(json.loads((self.setting.run / ".alive").read_text())["process"])
        raise AssertionError

    def _wait_until_gone(self, processes: list[int]) -> None:
        for process in processes:
            for _ in self._patiently(f"process {process} outlived its launcher"):
                if parent_of(process) is None:
                    break

    def _judge(self, record: InjectedFault, rows: list[dict[str, Any]]) -> None:
        kind = BY_NAME[record.kind]
        record.rows = rows
        right = named_right(kind, record.rank if record.rank is not None else -1, rows, record.node)
        record.named_right = record.named_right if right is None or record.spared else right
        told = [
            row["time"] for row in rows if row["kind"] in kind.told and abs(row["time"] - record.time) < 3600
        ]
        record.detected_s = max(0.0, min(told) - record.time) if told else None
        resumed = [row["resumed_step"] for row in rows if row["kind"] == "restart"]
        record.resumed = resumed[-1] if resumed else None

    # The run.

    def _committed(self) -> int:
        return max(RunDirectory(self.setting.run, node).step() for node in self.nodes)

    def _wait_for_commit(self, beyond: int) -> None:
        for _ in self._patiently(f"no commit after step {beyond}"):
            if self._committed() > beyond:
                return
            self._running()

    def _wait_for_copies(self) -> None:
        """So that one of them can be damaged. Whether there are still enough is checked at that time."""
        for _ in self._patiently(f"fewer than {COPIES} checkpoints on disk"):
            if len(self.run.disk.committed()) >= COPIES:
                return
            self._running()

    def _patiently(self, what: str) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            yield
            time.sleep(LOOK_SECONDS)
        raise Broken(f"{what} within {PATIENCE:.0f} s: {self._last_words()}")

    def _fault_rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run.faults)
