"""A rank that was started for another run is named on every rank; one that does not come is waited for, for a time."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.facts.config import Config
from shoal.launch.rendezvous import attempt_store
from shoal.parallel.signed_store import SignedStore
from shoal.train.guard.agreement import Disagreement, RankMissing, agree

FIX = "fix: start every rank with the same config, layout and versions"

Facts = dict[str, str]
SECRET = b"s" * 32


def facts(layout: str = "dp=4", torch: str = "2.13.0", **recipe: Any) -> Facts:
    config = Config.model_validate({"recipe": recipe})
    return {"layout": layout, "config": config.model_dump_json(), "torch": torch}


def verdict(
    rank: int, world: int, store: SignedStore, given: list[Facts | None], seconds: float
) -> tuple[str, str]:
    """What a rank raises; a rank without facts does not come."""
    mine = given[rank]
    if mine is None:
        return "", ""
    try:
        agree(store, rank, world, mine, timedelta(seconds=seconds))
    except (Disagreement, RankMissing) as error:
        return type(error).__name__, str(error)
    return "", ""


def in_process(
    rank: int, world: int, port: int, given: list[Facts | None], seconds: float
) -> tuple[str, str]:
    shared = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    return verdict(rank, world, attempt_store(SignedStore(shared, SECRET), 1), given, seconds)


def in_processes(*given: Facts | None, seconds: float = 30) -> list[tuple[str, str]]:
    """As under the launcher: its store, and a process for every rank."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(len(given), in_process, server.port, list(given), seconds)


def in_threads(*given: Facts | None, seconds: float = 30) -> list[tuple[str, str]]:
    store, world = SignedStore(dist.HashStore(), SECRET), len(given)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: verdict(rank, world, store, list(given), seconds), range(world)))


def test_ranks_that_agree() -> None:
    assert in_processes(facts(), facts()) == [("", "")] * 2
    assert in_threads(*[facts()] * 4) == [("", "")] * 4
    assert in_threads(facts()) == [("", "")]


def test_the_order_in_which_facts_are_written_is_no_difference() -> None:
    one, other = {"config": '{"a": 1, "b": 2}', "torch": "2"}, {"torch": "2", "config": '{"b": 2, "a": 1}'}
    assert in_threads(one, other) == [("", "")] * 2


def test_another_layout_in_real_processes() -> None:
    said = f"rank 2 of 4 differs from the others: layout is dp=4 on ranks 0-1, 3 but tp=4 on rank 2. {FIX}"
    assert in_processes(facts(), facts(), facts("tp=4"), facts()) == [("Disagreement", said)] * 4


def test_of_two_ranks_the_first_is_the_measure() -> None:
    said = (
        f"rank 1 of 2 differs from the others: config recipe.lr is 0.01 on rank 0 but 0.02 on rank 1. {FIX}"
    )
    assert in_processes(facts(lr=0.01), facts(lr=0.02)) == [("Disagreement", said)] * 2


def test_the_first_rank_may_be_the_odd_one() -> None:
    said = (
        "rank 0 of 3 differs from the others: config recipe.seed is 0 on ranks 1-2 but 7 on rank 0; "
        f"torch is 2.13.0 on ranks 1-2 but 2.12.1 on rank 0. {FIX}"
    )
    results = in_threads(facts(torch="2.12.1", seed=7), facts(), facts())
    assert results == [("Disagreement", said)] * 3


def test_several_culprits_are_all_named() -> None:
    said = (
        "ranks 1, 3 of 4 differ from the others: layout is dp=4 on ranks 0, 2-3 but fsdp=4 on rank 1; "
        f"config recipe.lr is 0.01 on ranks 0-2 but 0.5 on rank 3. {FIX}"
    )
    results = in_threads(facts(), facts("fsdp=4"), facts(), facts(lr=0.5))
    assert results == [("Disagreement", said)] * 4


def test_three_values_of_one_key() -> None:
    (_, said), *_ = in_threads(facts("dp=4"), facts("tp=4"), facts("pp=4"), facts("dp=4"))
    assert "layout is dp=4 on ranks 0, 3 but tp=4 on rank 1, pp=4 on rank 2." in said


def test_a_fact_that_only_some_have_and_long_values() -> None:
    (_, said), _ = in_threads({"layout": "dp=2", "model": "x" * 500}, {"layout": "dp=2"})
    assert f"model is {'x' * 79}… on rank 0 but missing on rank 1" in said


def test_only_a_few_keys_are_listed() -> None:
    other = json.dumps({"recipe": {str(number): number for number in range(9)}, "targets": [1]})
    (_, said), _ = in_threads({"config": "{}"}, {"config": other})
    assert said.count("missing on rank 0") == 4
    assert "; and 6 more." in said
    assert "\n" not in said


@pytest.mark.parametrize(("missing", "named"), [((2,), "rank 2"), ((1, 2), "ranks 1-2")])
def test_ranks_that_never_come(missing: tuple[int, ...], named: str) -> None:
    given = [None if rank in missing else facts() for rank in range(4)]
    started = time.monotonic()
    results = in_threads(*given, seconds=0.5)
    assert time.monotonic() - started < 10
    came = [result for rank, result in enumerate(results) if rank not in missing]
    assert {kind for kind, _ in came} == {"RankMissing"}
    assert {text.partition(". fix")[0] for _, text in came} == {f"{named} of 4 did not start within 0.5 s"}


def test_a_rank_that_never_comes_in_real_processes() -> None:
    (kind, said), absent = in_processes(facts(), None, seconds=0.5)
    assert (kind, absent) == ("RankMissing", ("", ""))
    assert said.startswith("rank 1 of 2 did not start within 0.5 s. fix: see logs/rank-00001.log")


def test_a_first_rank_that_never_comes() -> None:
    absent, *came = in_threads(None, facts(), facts(), seconds=0.5)
    assert absent == ("", "")
    for kind, text in came:
        assert kind == "RankMissing"
        assert text.startswith("rank 0 of 3 did not start within 0.5 s")


def test_a_late_rank_is_waited_for() -> None:
    store = SignedStore(dist.HashStore(), SECRET)

    def late(rank: int) -> tuple[str, str]:
        time.sleep(0.3 * rank)
        return verdict(rank, 3, store, [facts()] * 3, 30)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(late, range(3))) == [("", "")] * 3
