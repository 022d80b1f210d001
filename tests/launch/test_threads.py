"""Threads of a rank: what the user says, what the machine gives, what the work is worth; never the moment's load."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from shoal.facts.config.file import load
from shoal.launch import init_rank as joining
from shoal.launch.init_rank import given_threads, init_rank, thread_count
from shoal.plan.resolve import Job, resolve

WIDE = ("recipe.seq=1024", "recipe.batch=16", "model.preset=llama3.2-1b")


def job(*settings: str, layout: str = "dp=1") -> Job:
    return resolve(load(None, ["cluster.on=8xcpu", *settings], layout).config)


def test_a_tiny_model_has_one_thread_however_many_cores_there_are() -> None:
    assert thread_count(job(), ranks=1, available=2, environment={}) == 1
    assert thread_count(job(), ranks=1, available=64, environment={}) == 1


def test_more_work_has_more_threads_up_to_what_is_there() -> None:
    counts = [thread_count(job(f"recipe.batch={batch}"), 1, 8, {}) for batch in (16, 32, 64, 1024)]
    assert counts == [1, 3, 6, 8]
    assert thread_count(job(*WIDE), 1, 2, {}) == 2


def test_ranks_share_the_cores_and_the_work() -> None:
    assert thread_count(job(*WIDE, layout="dp=4"), 4, 8, {}) == 2
    assert thread_count(job(*WIDE, layout="dp=8"), 8, 2, {}) == 1
    # A micro-batch of a rank is what counts, not the batch.
    assert thread_count(job("recipe.batch=1024", layout="dp=1,micro=16"), 1, 8, {}) == 1
    assert thread_count(job("recipe.batch=64", layout="tp=2"), 1, 8, {}) == 3


def test_what_the_user_says_holds_but_for_strict_mode() -> None:
    for given in ("5", " 5 ", "5,2"):
        assert thread_count(job(), 4, 2, {"OMP_NUM_THREADS": given}) == 5
    assert thread_count(job(*WIDE), 1, 8, {"OMP_NUM_THREADS": "1"}) == 1
    strict = job("run.strict=true", *WIDE)
    assert thread_count(strict, 1, 8, {"OMP_NUM_THREADS": "5"}) == 1


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1.5", "9" * 5000])
def test_what_is_no_number_of_threads_says_nothing(text: str) -> None:
    assert given_threads({"OMP_NUM_THREADS": text}) is None


@pytest.mark.parametrize(("given", "used"), [("3", 3), ("", 1)])
def test_a_rank_computes_with_them(given: str, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(joining, "usable_threads", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")
    init_rank(job(), 0, 0, HashStore())
    assert seen == [used]
