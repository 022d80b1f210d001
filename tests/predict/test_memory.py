"""The memory ledger: what must hold of it everywhere. That it is the engine's own, tests/prove/test_twins.py holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.config import Lora
from shoal.facts.layout import SCHEDULES, Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.facts.schedules.programs import in_flight as most_in_flight
from shoal.facts.schedules.programs import instructions
from shoal.predict.memory import ledger, ledgers
from shoal.predict.memory.in_flight import moments
from shoal.predict.memory.inventory import rank_inventories
from shoal.predict.rank_parameters import rank_parameters, trained_with_experts
from shoal.predict.workload import Workload


def test_the_categories_add_up_and_the_worst_rank_is_the_worst() -> None:
    for layout in LAYOUTS:
        workload = Workload(PRESETS["mixtral-8x7b"], find("512xH100"), RECIPE, Layout.parse(layout))
        every, worst = ledgers(workload), ledger(workload)
        for one in every:
            named = (one.params, one.grads, one.optimizer, one.activations, one.logits, one.buffers)
            assert sum(named) == one.peak_allocated and min(named) >= 0, layout
            assert one.peak_allocated < one.reserved < one.device_total
        assert worst.peak_allocated == max(one.peak_allocated for one in every), layout


RECIPE = Recipe(seq=4096, batch=512, steps=1, precision="bf16")
LAYOUTS = [
    "fsdp=512,ep=8",
    "dp=64,fsdp=8,zero=1,micro=1",
    "fsdp=16,tp=8,cp=4",
    "fsdp=16,tp=8,cp=4,cp_kind=ulysses,sp=0,zero=2",
    "fsdp=32,pp=8,tp=2,ep=4,micro=1,recompute=selective",
    *(f"fsdp=16,zero=1,pp=16,tp=2,micro=4,schedule={schedule}" for schedule in SCHEDULES),
    "fsdp=512,offload=optimizer:0.5+params@nvme+activations",
]


def test_a_policy_that_saves_memory_does() -> None:
    def peak(layout: str, compile: bool | None = None, **recipe: Any) -> int:
        used = RECIPE.model_copy(update=recipe)
        asked = Workload(PRESETS["llama3-8b"], find("8xH100"), used, Layout.parse(layout), compile=compile)
        return ledger(asked).peak_allocated

    base = "fsdp=8,micro=2"
    assert peak(base) > peak(f"{base},recompute=selective") > peak(f"{base},recompute=full")
    assert peak(f"{base},zero=1") > peak(f"{base},zero=2") > peak(base)
    assert peak(base) > peak(f"{base},offload=activations:0.5") > peak(f"{base},offload=activations")
    assert peak(base, states="int8") < peak(base, states="bf16") < peak(base)
    assert peak(f"{base},offload=optimizer") < peak(f"{base},offload=optimizer:0.5") < peak(base)
    assert peak(f"{base},unit=4") > peak(base)
    # A compiled block keeps what it has gathered, and makes norms anew where they are whole.
    assert peak("fsdp=2,tp=4,sp=0,micro=2", compile=False) > peak("fsdp=2,tp=4,micro=2", compile=False)
    assert peak(base) < peak(base, compile=False)


def test_lora_trains_little_of_a_frozen_model() -> None:
    workload = Workload(PRESETS["llama2-7b"], find("1xH100"), RECIPE, Layout.parse("micro=1,recompute=full"))
    whole, adapted = ledger(workload), ledger(replace(workload, lora=Lora()))
    assert not whole.fits and adapted.fits
    assert adapted.params == pytest.approx(2 * 6.74e9, rel=0.02)
    assert adapted.optimizer < 0.01 * whole.optimizer and adapted.grads < 0.01 * whole.grads


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_flight_is_what_the_schedule_holds(schedule: str) -> None:
    chunks = 2 if schedule in ("interleaved", "zbv", "dualpipev") else 1
    for pp, micro_batches in ((2, 1), (4, 3), (4, 40), (8, 64)):
        expected = most_in_flight(instructions(schedule, pp, chunks, micro_batches))
        for rank in range(pp):
            found = moments(schedule, pp, chunks, micro_batches, rank)
            most = max(sum(one.held) + sum(one.deferred) for one in found)
            assert most == expected[rank], (pp, micro_batches, rank)


@pytest.mark.parametrize("lora", [None, Lora(rank=8)], ids=["all", "lora"])
@pytest.mark.parametrize("model", ["llama3.2-1b", "qwen3-8b", "mixtral-8x7b", "gpt2"])
def test_memory_and_traffic_count_the_same_trained_parameters(model: str, lora: Lora | None) -> None:
    for text in ("dp=2", "fsdp=4,tp=2", "tp=2,pp=4,micro=1", "fsdp=2,pp=2,schedule=zbv,micro=1"):
        layout = Layout.parse(text)
        workload = Workload(
            PRESETS[model],
            find(f"{layout.world}xH100"),
            Recipe(seq=512, batch=64, steps=1),
            layout,
            lora=lora,
        )
        for rank in rank_inventories(workload):
            here = rank_parameters(layout, workload.model, workload.cut_by, rank.number)
            assert rank.total.trained == trained_with_experts(workload, here), (text, rank.number)
