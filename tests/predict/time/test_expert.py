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


def waited(model: Model, layout: str = "fsdp=64,ep=64,micro=1") -> dict[str, float]:
    workload = Workload(model, find("64xH100"), Recipe(seq=4096, batch=64), Layout.parse(layout))
    here = rank_parameters(workload.layout, model, workload.cut_by, 0)
    found: dict[str, float] = {}
    for ways in expert.waits(workload, cost_model(workload), here, SHARE).values():
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
