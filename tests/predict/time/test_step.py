"""The time ledger: parts that add up, and how each axis and policy moves it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.flops import flops_per_token
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload

PARTS = ("compute", "recompute", "exposed_comm", "bubble", "optimizer", "offload", "other")


def taken(
    layout: str, model: str = "llama3-8b", on: str = "64xH100", lora: Lora | None = None, **recipe: Any
) -> StepTime:
    said = {"seq": 4096, "batch": 256, "precision": "bf16", **recipe}
    asked = Workload(PRESETS[model], find(on), Recipe.model_validate(said), Layout.parse(layout), lora=lora)
    return step(asked)


EVERY = [
    "dp=64",
    "fsdp=64",
    "fsdp=64,zero=1",
    "fsdp=64,zero=2,micro=1",
    "dp=8,fsdp=8,unit=2",
    "fsdp=8,tp=8",
    "fsdp=8,tp=8,sp=0,recompute=full",
    "fsdp=16,cp=4",
    "fsdp=16,cp=4,cp_kind=ulysses,recompute=selective",
    "fsdp=16,pp=4",
    "fsdp=16,pp=4,schedule=interleaved,chunks=4",
    "fsdp=8,tp=2,pp=4,schedule=zbv",
    "dp=16,pp=4,schedule=dualpipev,micro=1",
    "fsdp=64,offload=optimizer+params:0.5+activations@nvme",
]


@pytest.mark.parametrize("layout", EVERY)
def test_parts_add_up(layout: str) -> None:
    ledger = taken(layout)
    assert all(getattr(ledger, part) >= 0 for part in PARTS)
    assert sum(getattr(ledger, part) for part in PARTS) == pytest.approx(ledger.seconds)


@pytest.mark.parametrize("layout", EVERY)
def test_nobody_beats_the_device(layout: str) -> None:
    peak = find("64xH100").device.peak("bf16")
    assert peak is not None
    flops = flops_per_token(PRESETS["llama3-8b"], 4096) * 256 * 4096 / 64
    assert flops / taken(layout).seconds < 0.75 * peak


def test_experts_are_priced_in_every_layout() -> None:
    sparse = taken("fsdp=64,ep=8", "mixtral-8x7b")
    assert sparse.seconds > taken("fsdp=64").seconds
    assert taken("fsdp=256,ep=64", "deepseek-v3", "256xH100").exposed_comm > 0


def test_recomputation_costs_what_it_repeats() -> None:
    none, selective, full = (taken(f"fsdp=64,recompute={kind}") for kind in ("none", "selective", "full"))
    assert none.recompute == 0 < selective.recompute < full.recompute
    assert full.recompute == pytest.approx(full.compute / 3, rel=0.25)


def test_tensor_parallelism_across_nodes_is_dear() -> None:
    assert taken("fsdp=4,tp=16").exposed_comm > 1.5 * taken("fsdp=8,tp=8").exposed_comm


def test_slow_links_show_in_what_is_exposed() -> None:
    fast, slow = (taken("fsdp=8", on=on).exposed_comm for on in ("8xH100", "1x8xL40S"))
    assert slow > 2 * fast


def test_more_micro_batches_shrink_the_bubble() -> None:
    shares = [taken(f"fsdp=8,pp=8,micro={micro}") for micro in (4, 2, 1)]
    idle = [one.bubble / one.seconds for one in shares]
    assert idle[0] > idle[1] > idle[2]


def test_fewer_micro_batches_than_stages_are_priced() -> None:
    assert taken("fsdp=8,pp=8,micro=8").bubble > taken("fsdp=8,pp=8,micro=4").bubble


def test_frozen_weights_spare_their_gradients() -> None:
    assert taken("dp=64", lora=Lora()).compute < 0.85 * taken("dp=64").compute


def test_offload_is_not_free() -> None:
    none, states = taken("fsdp=64"), taken("fsdp=64,offload=optimizer")
    assert none.offload == 0 < states.offload
    assert taken("fsdp=64,offload=optimizer@nvme").offload > states.offload


def test_a_step_of_twice_the_batch_takes_at_most_twice_as_long() -> None:
    one, two = taken("fsdp=64,micro=2", batch=128), taken("fsdp=64,micro=2", batch=256)
    assert one.seconds < two.seconds <= 2 * one.seconds


def test_exposed_communication_is_told_by_group() -> None:
    links = taken("fsdp=8,tp=8").links
    assert links["tp"] > 0 and links["fsdp"] > 0
