"""torchrun's agent ends the peers of a rank that has died. Those deaths are ours, whenever they are noticed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from shoal.launch.agent import Agent
from shoal.launch.rendezvous import LoopbackRendezvous
from shoal.train.guard.processes import is_gone, is_stopped

SECONDS = 60.0


def work(path: Path) -> None:
    """Rank 2 is stopped, then rank 0 gives up, as if on it; rank 1 does nothing wrong."""
    rank = int(os.environ["RANK"])
    (path / f"{rank}.new").write_text(str(os.getpid()))
    (path / f"{rank}.new").rename(path / str(rank))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        other = path / "2"
        while not other.exists() or not is_stopped(int(other.read_text())):
            time.sleep(0.01)
        (path / "died").write_text(str(time.monotonic()))
        os._exit(1)
    time.sleep(SECONDS)


def in_thread(function: Callable[[], Any]) -> Any:
    """As a launcher has it: in the main thread torch would handle signals."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_who_torchs_agent_ends_is_noted_as_ended_by_us(tmp_path: Path) -> None:
    """While the thread that watches is busy with something else: it notes nothing."""
    spec = WorkerSpec("test", 3, LoopbackRendezvous("run", SECONDS), entrypoint=work, args=(tmp_path,))
    spec.max_restarts, spec.monitor_interval = 0, 0.01
    agent = Agent(spec, lambda rank: False)
    assert in_thread(agent.run).is_failed()
    # torch alone waits for half a minute for one that is stopped.
    assert time.monotonic() - float((tmp_path / "died").read_text()) < 25
    deaths = {death.rank: death for death in agent.crew.deaths()}
    assert next(iter(deaths)) == 0  # the first
    assert (deaths[0].by_us, deaths[0].code) == (False, 1)
    assert (deaths[1].by_us, deaths[1].stopped) == (True, False)
    assert (deaths[2].by_us, deaths[2].stopped) == (True, True)


def test_who_was_stopped_is_known_although_it_ran_for_a_moment(tmp_path: Path) -> None:
    """Who asks a stopped rank for its stacks lets it run; it may be ended just then."""
    spec = WorkerSpec("test", 3, LoopbackRendezvous("run", SECONDS), entrypoint=work, args=(tmp_path,))
    spec.max_restarts = 0
    agent = Agent(spec, lambda rank: False)
    in_thread(partial(agent._initialize_workers, agent.get_worker_group()))
    try:
        deadline = time.monotonic() + SECONDS
        while not agent.crew.stopped:
            assert time.monotonic() < deadline
            agent.crew.looked = 0.0
            agent.crew.first_death = float("inf")  # nobody is ended yet
            agent.watch(0.01)
        os.kill(agent.processes()[2], signal.SIGCONT)
    finally:
        agent._shutdown()
    assert [death.rank for death in agent.crew.deaths() if death.stopped] == [2]


def fails_at_once() -> None:
    if os.environ["RANK"] == "0":
        os._exit(3)
    time.sleep(SECONDS)


def test_who_fails_before_all_have_started_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it happened on a busy machine: its death was not noted, and its peers were all that had ended."""
    start = LocalElasticAgent._start_workers

    def slowly(agent: LocalElasticAgent, group: WorkerGroup) -> dict[int, int]:
        started = start(agent, group)
        deadline = time.monotonic() + SECONDS
        while not is_gone(started[0]) and len(multiprocessing.active_children()) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return started

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", slowly)
    spec = WorkerSpec("test", 2, LoopbackRendezvous("run", SECONDS), entrypoint=fails_at_once)
    spec.max_restarts, spec.monitor_interval = 0, 0.01
    agent = Agent(spec, lambda rank: False)
    assert in_thread(agent.run).is_failed()
    first = agent.crew.deaths()[0]
    assert (first.rank, first.code, first.by_us) == (0, 3, False)


@pytest.mark.parametrize("given", [(), (signal.SIGINT,), (signal.SIGINT, 30)])
def test_every_supported_torch_shuts_its_workers_down(
    given: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.11 hands on a signal at most, 2.13 a timeout too. As it happened: with 2.11 no run came to its end."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda agent, *given: seen.append(given))
    agent = Agent(WorkerSpec("test", 1, LoopbackRendezvous("run", SECONDS), entrypoint=work), bool)
    agent._shutdown(*given)
    assert seen == [given]
