"""Work in a process of its own: its result is the one that it has here, also where that process fails."""

from __future__ import annotations

import os
import threading

import pytest

from shoal.facts.cluster import notation
from shoal.facts.model import presets
from shoal.facts.recipe import Recipe
from shoal.plan import search, search_process


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has imported torch, and a thread of its own; neither does anything now."""
    monkeypatch.setattr(search_process, "may_fork", lambda: True)


@pytest.mark.usefixtures("forks")
def test_another_process_computes() -> None:
    here = os.getpid()
    found = search_process.in_other_process(lambda: (os.getpid(), [1.5, "two"]))()
    assert found[0] != here and found[1] == [1.5, "two"]


@pytest.mark.usefixtures("forks")
def test_what_fails_there_is_done_here() -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            raise MemoryError
        return 7

    assert search_process.in_other_process(work)() == 7


def test_no_thread_is_left_behind() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not search_process.may_fork()
        assert search_process.in_other_process(os.getpid)() == os.getpid()
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("forks")
def test_a_search_in_two_processes_finds_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = presets.find("llama3-8b"), notation.find("16xH100"), Recipe(seq=8192, batch=8, precision="bf16")
    whole = search.search(*asked)
    monkeypatch.setattr(search, "LARGE", 0)
    both = search.search(*asked)
    assert both.plans[0].layout == whole.plans[0].layout and both.plans[0].layout.cp > 1
    assert both.plans[0].step == whole.plans[0].step and both.plans[0].memory == whole.plans[0].memory
    assert both.chosen is not None and whole.chosen is not None
    assert both.chosen.answers.keys() == whole.chosen.answers.keys()
    for name, plan in both.chosen.answers.items():
        assert plan.layout == whole.chosen.answers[name].layout
    assert (both.searched, both.proven) == (whole.searched, whole.proven) and both.proven
