"""Tokens on their way to experts: the busiest rank sets the pace, shared experts hide some of the wait."""

from __future__ import annotations

import pytest

from shoal.facts import expert_load
from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.rank_parameters import rank_parameters
from shoal.predict.time import expert
from shoal.predict.time.layer import LayerShare, products
from shoal.predict.time.step import cost_model
from shoal.predict.workload import Workload

DEEPSEEK = PRESETS["deepseek-v3"]
SHARE = LayerShare(4096, 4096.0, 1, 4096, 1, 64, experts=True)


def waited(
    model: Model, layout: str = "fsdp=64,ep=64,micro=1", on: str = "64xH100", parts: int = 1
) -> dict[str, float]:
    workload = Workload(model, find(on), Recipe(seq=4096, batch=64), Layout.parse(layout))
    here = rank_parameters(workload.layout, model, workload.cut_by, 0)
    found: dict[str, float] = {}
    share = SHARE._replace(expert_parts=parts)
    for ways in expert.waits(workload, cost_model(workload), here, share).values():
        for way, seconds in ways.items():
            found[way] = found.get(way, 0.0) + seconds
    return found


def test_the_busiest_rank_sets_the_pace() -> None:
    last = products(DEEPSEEK, SHARE)[-1]
    even = 4096 * 8 // 4
    assert last.groups == 4 and last.rows == pytest.approx(expert_load.BUSIEST * even, abs=1)
    # A rank that has all experts has all their tokens, however these are spread.
    last = products(DEEPSEEK, SHARE._replace(ep=1))[-1]
    assert (last.rows, last.groups) == (4096 * 8 // 256, 256)


def test_uneven_tokens_take_longer_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = waited(DEEPSEEK)
    monkeypatch.setattr(expert_load, "BUSIEST", 1.0)
    assert all(uneven[way] > seconds for way, seconds in waited(DEEPSEEK).items())


def test_shared_experts_are_computed_meanwhile() -> None:
    assert DEEPSEEK.experts is not None
    alone = DEEPSEEK.model_copy(
        update={"experts": DEEPSEEK.experts.model_copy(update={"shared": 0, "shared_ffn": 0})}
    )
    hidden, exposed = waited(DEEPSEEK), waited(alone)
    assert set(hidden) == {"forward", "backward"}
    assert all(0 < hidden[way] < exposed[way] for way in hidden)
    # A backward pass has twice the products to hide as many bytes behind.
    assert exposed["backward"] - hidden["backward"] > exposed["forward"] - hidden["forward"]


def test_without_expert_ranks_nothing_waits() -> None:
    assert waited(DEEPSEEK, "fsdp=64,micro=1") == {}


def test_tokens_in_parts_wait_less_and_never_for_nothing() -> None:
    model = PRESETS["qwen3-30b-a3b"]  # without shared experts to hide behind
    together, in_parts = waited(model), waited(model, parts=2)
    assert all(0 < in_parts[way] < together[way] for way in together)
    # The first part to cross and the last to come home hide behind nothing: a quarter of it at least.
    assert all(in_parts[way] > together[way] / 4 for way in together)


@pytest.mark.parametrize(("on", "layout"), [("8x1xH100", "fsdp=8,ep=8"), ("64xH100", "fsdp=8,tp=8,ep=8")])
def test_between_nodes_of_one_rank_tokens_travel_together_and_all_of_it_is_waited_for(
    on: str, layout: str
) -> None:
    model = PRESETS["qwen3-30b-a3b"]
    workload = Workload(model, find(on), Recipe(seq=4096, batch=64), Layout.parse(layout))
    assert workload.expert_nodes.across.size == 8 and workload.expert_parts == 1
    times = cost_model(workload)
    here = rank_parameters(workload.layout, model, workload.cut_by, 0)
    sent = [call for call in expert.tokens(workload, here) if call.group == "ep"]
    _, ranks, stride = workload.ranks_of("ep")
    alone = sum(times.links.seconds(call.op, call.bytes, ranks, stride) * call.count for call in sent)
    assert sum(waited(model, layout, on).values()) * workload.accumulation >= alone
