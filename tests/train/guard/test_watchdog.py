"""Real ranks that hang in every way there is, and a watchdog in another process that says which rank, and where."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.waiting import waited

from shoal.observe.flight_recorder import (
    COMMIT,
    FIRST_STEP,
    INPUT,
    STEP,
    Channel,
    FlightEntry,
    FlightReader,
    FlightRecorder,
    Snapshot,
)
from shoal.observe.record import recording
from shoal.train.guard.stacks import Standing, stacks_on_signal
from shoal.train.guard.stalls import StallVerdict
from shoal.train.guard.watchdog import Limits, Watchdog
from shoal.train.guard.watched_ranks import LocalRanks
from shoal.train.run_directory import RunDirectory

LIMITS = Limits(step=1.0, patient=3.0)
LONG = 60


def judged(
    world: int, function: Callable[..., None], path: Path, seconds: float = 30.0
) -> StallVerdict | None:
    """What a watchdog says of ranks that run ``function``; None where they end, or time does, without a verdict."""
    run = RunDirectory(path)
    run.path.mkdir(exist_ok=True)

    def work() -> None:
        # Ranks that hang are killed below, which the others notice.
        with contextlib.suppress(AssertionError):
            run_ranks(world, _recorded, path, function)

    thread = threading.Thread(target=work)
    thread.start()
    processes: list[int] = []
    watchdog = Watchdog(LocalRanks(run, range(world), lambda: dict(enumerate(processes))), LIMITS)
    readers = [FlightReader(run.flight(rank)) for rank in range(world)]
    deadline = time.monotonic() + seconds
    verdict = None
    while verdict is None and thread.is_alive() and time.monotonic() < deadline:
        seen = [reader.look() for reader in readers]
        processes = [snapshot.pid for snapshot in seen if snapshot is not None]
        verdict = watchdog.poll()
        time.sleep(0.02)
    if thread.is_alive():
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    thread.join()
    return verdict


def test_ranks_that_have_not_begun_show_nothing(tmp_path: Path) -> None:
    """Not a world of none: those of other nodes would be added to it, and have more members at the next look."""
    assert LocalRanks(RunDirectory(tmp_path), range(2), dict).look() is None


def _recorded(rank: int, world: int, path: Path, function: Callable[..., None]) -> None:
    run = RunDirectory(path)
    names = {dist.group.WORLD.group_name: "dp"} if world > 1 else {}
    with (
        FlightRecorder(run.flight(rank)) as flight,
        stacks_on_signal(run.stack_dump(rank)),
        recording(flight, names),
    ):
        flight.enter(STEP, 7)
        for _ in range(3 if world > 1 else 0):
            dist.all_reduce(torch.ones(1000))
        function(rank, flight)


def _sleep(rank: int, flight: FlightRecorder) -> None:
    if rank == 1:
        time.sleep(LONG)
    dist.all_reduce(torch.ones(2000))


def _hold_the_lock(rank: int, flight: FlightRecorder) -> None:
    if rank == 1:
        # Unlike CDLL, PyDLL keeps Python's lock during the call: no thread of this process runs.
        ctypes.PyDLL(None).sleep(LONG)
    dist.all_reduce(torch.ones(2000))


def _compute_in_the_lock(rank: int, flight: FlightRecorder) -> None:
    if rank == 1:
        # One instruction of Python's, so nobody can interrupt it.
        sum(range(1 << 62))
    dist.all_reduce(torch.ones(2000))


def _stop(rank: int, flight: FlightRecorder) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2000))


@pytest.mark.parametrize(
    ("function", "word", "doing"),
    [
        (_sleep, "sleep", "sleeping, "),
        (_hold_the_lock, "sleep", "holding the Python lock, sleeping, "),
        (_compute_in_the_lock, "sum", "holding the Python lock, computing, "),
        (_stop, "os.kill", "stopped by a signal or a debugger, "),
    ],
)
def test_the_missing_rank_its_collective_and_all_lines_are_named(
    tmp_path: Path, function: Callable[..., None], word: str, doing: str
) -> None:
    verdict = judged(2, function, tmp_path / "run")
    assert verdict is not None
    assert verdict.rank == 1
    what, standing, waiting = verdict.message.splitlines()
    line = _line_of(function, "all_reduce")
    assert what.startswith("in step 7, it has not joined all_reduce #4 of group dp (ranks 0,1, 8.0 kB) ")
    assert f"at {line}, where rank 0 has waited for " in what and waited(what) >= 1
    assert standing == f"  rank 1: {doing}at {_line_of(function, word)} in {function.__name__}"
    assert waiting == f"  rank 0: at {line} in {function.__name__}"
    assert verdict.row["collective"] == {
        "op": "all_reduce",
        "group": "dp",
        "ranks": [0, 1],
        "number": 4,
        "bytes": 8000,
        "where": line,
    }
    for rank in range(2):
        text = (tmp_path / "run" / "stacks" / f"rank-{rank:05d}.txt").read_text()
        assert text.startswith(f"rank {rank}, process ")
        assert f"all_reduce #{4 - rank} of dp" in text
        assert f"in {function.__name__}\n" in text


def _wait_for_input(rank: int, flight: FlightRecorder) -> None:
    flight.enter(INPUT, 8)
    if rank == 1:
        # As the training loop waits for its loader, which is stuck.
        queue.Queue[int]().get()
    flight.enter(STEP, 8)
    dist.all_reduce(torch.ones(2000))


def test_a_rank_that_has_no_input_is_told_from_one_that_computes(tmp_path: Path) -> None:
    verdict = judged(2, _wait_for_input, tmp_path / "run")
    assert verdict is not None and verdict.rank == 1
    what, why, standing, *_ = verdict.message.splitlines()
    assert "it has not joined all_reduce #4 of group dp" in what
    assert why == "  it still waits for its input"
    assert standing == f"  rank 1: sleeping, at {_line_of(_wait_for_input, '.get')} in _wait_for_input"


def _skip(rank: int, flight: FlightRecorder) -> None:
    others = dist.new_group([0, 1, 2])
    if rank != 2:
        dist.all_reduce(torch.ones(2000))
    dist.all_reduce(torch.ones(10), group=others)


def test_a_rank_that_skips_a_collective_and_waits_in_the_next_is_named(tmp_path: Path) -> None:
    """Everybody waits; the one that the most wait for has left the common order."""
    verdict = judged(3, _skip, tmp_path / "run")
    assert verdict is not None and verdict.rank == 2
    assert "it has not joined all_reduce #4 of group dp (ranks 0,1,2, 8.0 kB)" in verdict.message
    assert "it waits itself, in all_reduce #1 of group dp, which ranks 0,1 have not joined" in verdict.message


def _mismatch(rank: int, flight: FlightRecorder) -> None:
    if rank == 2:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(2000))
    time.sleep(LONG)


def test_ranks_that_meet_in_different_collectives_are_told_apart(tmp_path: Path) -> None:
    verdict = judged(3, _mismatch, tmp_path / "run")
    assert verdict is not None and verdict.rank == 2
    assert "ranks disagree in group dp: as #4, ranks 0,1 entered all_reduce (8.0 kB)" in verdict.message
    assert "; rank 2 entered barrier (0 bytes) at " in verdict.message


def _chain(rank: int, flight: FlightRecorder) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which sleeps."""
    last = dist.new_group([1, 2])
    if rank == 2:
        time.sleep(LONG)
    if rank > 0:
        dist.all_reduce(torch.ones(10), group=last)
    dist.all_reduce(torch.ones(2000))


def test_a_rank_that_only_waits_for_another_is_not_blamed(tmp_path: Path) -> None:
    verdict = judged(3, _chain, tmp_path / "run")
    assert verdict is not None
    assert verdict.rank == 2
    assert verdict.row["missing"] == [2]


def _message(rank: int, flight: FlightRecorder) -> None:
    """Rank 1 asks for the second message ahead of time, and then sleeps before it sends its own."""
    if rank == 0:
        dist.send(torch.ones(500), 1)
        dist.recv(torch.ones(500), 1)
        dist.send(torch.ones(500), 1)
    else:
        dist.recv(torch.ones(500), 0)
        ahead = dist.irecv(torch.ones(500), 0)
        assert ahead is not None
        time.sleep(LONG)
        dist.send(torch.ones(500), 0)
        ahead.wait()


def test_a_message_that_was_not_sent_is_named(tmp_path: Path) -> None:
    verdict = judged(2, _message, tmp_path / "run")
    assert verdict is not None
    assert verdict.rank == 1
    assert (
        "it has not sent message #1 of group dp to rank 0, 2.0 kB, which rank 0 has waited for"
        in verdict.message
    )
    assert f"rank 1: sleeping, at {_line_of(_message, 'sleep')} in _message" in verdict.message


def _alone(rank: int, flight: FlightRecorder) -> None:
    time.sleep(LONG)


def test_a_rank_alone_that_does_not_go_on_is_seen(tmp_path: Path) -> None:
    verdict = judged(1, _alone, tmp_path / "run")
    assert verdict is not None
    assert "no rank has entered a collective or ended its step for " in verdict.message
    assert waited(verdict.message) >= 3
    assert f"rank 0: sleeping, at {_line_of(_alone, 'sleep')} in _alone" in verdict.message


def _late(rank: int, flight: FlightRecorder) -> None:
    for phase in (FIRST_STEP, COMMIT):
        flight.enter(phase, 8)
        if rank == 1:
            time.sleep(LIMITS.step + 0.5)
        dist.all_reduce(torch.ones(10))
    flight.enter(STEP, 9)
    # Short of the limit each, and longer together.
    for _ in range(3):
        if rank == 1:
            time.sleep(LIMITS.step / 2)
        dist.all_reduce(torch.ones(10))


def test_what_may_take_long_is_no_stall(tmp_path: Path) -> None:
    assert judged(2, _late, tmp_path / "run") is None


def _uneven(rank: int, flight: FlightRecorder) -> None:
    """Rank 1 has so much more to do that the others wait longer than the limit, in every step."""
    for phase, step in ((FIRST_STEP, 7), (STEP, 8), (STEP, 9)):
        flight.enter(phase, step)
        if rank == 1:
            time.sleep(LIMITS.step + 0.4)
        dist.all_reduce(torch.ones(10))


def test_a_wait_like_those_before_it_is_no_stall(tmp_path: Path) -> None:
    assert judged(2, _uneven, tmp_path / "run") is None


def test_we_speak_before_torch_gives_up() -> None:
    usual = Limits.of(stall=30.0, timeout=60.0)
    assert (usual.step, usual.patient) == (30.0, 54.0)
    assert Limits.of(stall=30.0, timeout=20.0) == Limits(step=10.0, patient=18.0)
    assert Limits.of(stall=30.0, timeout=1.0) == Limits(step=1.0, patient=1.0)


def _line_of(function: Callable[..., None], word: str) -> str:
    """Where in this file a function has its last line with that word."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + place for place, line in enumerate(lines) if f"{word}(" in line][-1:]
    return f"tests/train/guard/test_watchdog.py:{number}"


def test_nobody_is_blamed_on_half_of_the_evidence() -> None:
    """Rank 0 gives up while the other node is still asked; who was stopped there is not known."""

    class Ranks:
        """Two ranks here, two elsewhere, all in the same collective."""

        def __init__(self) -> None:
            channel = Channel("7", "dp", (0, 1, 2, 3))
            entry = FlightEntry(channel, 9, "all_reduce", 8, 0.0, "loop.py:1")
            self.seen = [Snapshot(10 + rank, 1, 7, STEP, 3, {channel: 9}, (entry,)) for rank in range(4)]
            self.asked = self.heard = False

        def look(self, entries: bool = False) -> list[Snapshot] | None:
            return None if self.asked else self.seen

        def progressing(self) -> bool:
            return False

        def any_stopped(self) -> bool:
            return True

        def evidence(self, snapshots: Sequence[Snapshot], patience: float) -> dict[int, Standing]:
            self.asked = True
            return {rank: Standing(stopped=rank == 2) for rank in range(4 if self.heard else 2)}

    for heard in (False, True):
        ranks = Ranks()
        ranks.heard = heard
        watchdog = Watchdog(ranks, Limits(step=0.0, patient=3.0))
        found = []
        for _ in range(3):
            watchdog._looked -= 1.0
            found.append(watchdog.poll())
        verdicts = [verdict.rank for verdict in found if verdict is not None]
        assert verdicts == ([2] if heard else [])
