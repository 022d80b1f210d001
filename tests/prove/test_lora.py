"""LoRA: no layout changes the run; traffic and memory are what is predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from tests.predict.counted import ask
from tests.thinned import thinned

from shoal.facts.cluster.notation import find
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.memory import ledger
from shoal.predict.workload import Workload
from shoal.prove.dryrun import dryrun, first_rank
from shoal.prove.parity import Prover

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LAYOUTS = (
    "dp=2,pp=2,schedule=zbv",
    "fsdp=2",
    "fsdp=2,zero=1,recompute=full",
    "tp=4,sp=0,recompute=selective",
    "tp=2",
    "dp=2,micro=2",
    "cp=2",
    "pp=2",
    "fsdp=2,zero=2,micro=1",
    "fsdp=2,tp=2",
)
TRAFFIC = (
    *LAYOUTS,
    "dp=2,fsdp=2",
    "fsdp=2,unit=2,recompute=full",
    "tp=2,recompute=full",
    "cp=2,cp_kind=ulysses",
    "fsdp=2,pp=2",
    "fsdp=2,zero=2,tp=2,sp=0",
    "tp=2,pp=2,schedule=zb",
)


# Layout, targets, precision: what each of the moments that can be the fullest depends on.
MEMORY = [
    ("micro=4", EVERY, "bf16"),
    ("micro=4", ["down_proj"], "fp32"),
    ("dp=2,micro=2", ["o_proj"], "bf16"),
    ("fsdp=2,micro=2", ["q_proj", "v_proj"], "bf16"),
    ("fsdp=2,zero=1,micro=4,recompute=selective", EVERY, "fp32"),
    ("micro=4,recompute=selective", ["up_proj"], "bf16"),
    ("micro=4,recompute=full", ATTENTION, "fp32"),
    ("fsdp=2,micro=4,recompute=full", EVERY, "bf16"),
    ("tp=2,micro=2", EVERY, "bf16"),
    ("tp=2,micro=4,recompute=full", ["down_proj"], "bf16"),
    ("tp=2,micro=4,recompute=selective", ["q_proj", "v_proj"], "bf16"),
    ("tp=2,sp=0,micro=2,recompute=full", EVERY, "bf16"),
    ("pp=2,micro=1", EVERY, "bf16"),
    ("pp=2,micro=1,recompute=full", ["down_proj"], "fp32"),
    ("pp=2,micro=1,recompute=selective", ["k_proj"], "bf16"),
    ("pp=2,micro=1,schedule=zb", EVERY, "bf16"),
    ("fsdp=2,pp=2,micro=1", ["q_proj", "v_proj"], "bf16"),
]


PACKED = [
    ("micro=1", EVERY),
    ("fsdp=2,micro=1,recompute=full", EVERY),
    ("fsdp=2,micro=1,recompute=full", ["q_proj", "v_proj"]),
    ("tp=2,micro=1,recompute=selective", EVERY),
    ("pp=2,micro=1", EVERY),
]


@pytest.mark.parametrize(
    ("layout", "targets"), thinned(PACKED, 6), ids=lambda value: str(value).replace("_proj", "")
)
def test_memory_and_traffic_of_four_bits_are_what_is_predicted(layout: str, targets: list[str]) -> None:
    lora = Lora(rank=8, alpha=16, targets=targets, base="nf4")
    workload = replace(ask(layout, {"layers": 4}, precision="bf16", batch=8), lora=lora)
    seen = dryrun(workload, 0)
    assert seen.traffic == seen.predicted_traffic
    assert seen.memory.params == pytest.approx(seen.predicted.params, rel=1e-3)
    assert seen.memory.peak_allocated == pytest.approx(seen.predicted.peak_allocated, rel=0.015)


# A frozen base and its adapters off the device: what is fetched, what leaves and what stays for other ranks' gradients.
OFFLOADED = [
    ("tp=2,micro=2,recompute=full,offload=params", EVERY, "bf16"),
    ("fsdp=2,micro=1,recompute=full,offload=params", EVERY, "nf4"),
    ("micro=4,recompute=selective,offload=activations", EVERY, "bf16"),
    ("fsdp=2,zero=1,micro=2,recompute=full,offload=optimizer+params", EVERY, "bf16"),
    ("micro=1,recompute=full,offload=params", EVERY, "nf4"),
    ("pp=2,micro=1,recompute=full,offload=params", EVERY, "bf16"),
    ("micro=4,recompute=full,offload=params:0.5", ["q_proj", "v_proj"], "bf16"),
    ("micro=4,offload=optimizer", EVERY, "bf16"),
    ("micro=4,recompute=selective,offload=activations", ["q_proj", "v_proj"], "bf16"),
    # The base in files, and what adapters have of states and gradients with it.
    ("fsdp=2,micro=1,recompute=full,offload=params@nvme", EVERY, "nf4"),
    ("tp=2,micro=2,recompute=full,offload=params@nvme", EVERY, "bf16"),
    ("fsdp=2,zero=1,micro=2,recompute=full,offload=optimizer+params@nvme", EVERY, "bf16"),
    ("dp=2,micro=2,recompute=full,offload=params@nvme", EVERY, "nf4"),
    ("pp=2,micro=1,recompute=full,offload=params@nvme", EVERY, "bf16"),
    ("micro=4,recompute=full,offload=params:0.5@nvme", EVERY, "bf16"),
]


@pytest.mark.parametrize(
    ("layout", "targets", "base"), thinned(OFFLOADED, 5), ids=lambda value: str(value).replace("_proj", "")
)
def test_offloaded_bytes_are_what_is_predicted(
    layout: str, targets: list[str], base: Literal["bf16", "nf4"]
) -> None:
    lora = Lora(rank=8, alpha=16, targets=targets, base=base)
    workload = replace(ask(layout, {"layers": 4}, precision="bf16", batch=8), lora=lora)
    for stage in {0, workload.layout.pp - 1}:
        assert dryrun(workload, first_rank(workload.layout, stage)).differences(0) == []


OF_OFFLOAD = (
    "fsdp=2,offload=params",
    "recompute=selective,offload=activations",
    "tp=2,offload=optimizer+params",
    "fsdp=2,zero=1,offload=optimizer+params",
    "fsdp=2,pp=2,recompute=full,offload=params+activations",
    "dp=2,offload=optimizer+params:0.5",
    "fsdp=2,offload=params@nvme",
    "offload=params@nvme",
    "fsdp=2,zero=1,recompute=full,offload=params@nvme",
    "tp=2,offload=params@nvme",
    "pp=2,offload=optimizer+params:0.5@nvme",
)


@pytest.mark.parametrize("layout", thinned(OF_OFFLOAD, 4))
def test_offload_does_not_change_the_run(make_prover: Callable[..., Prover], layout: str) -> None:
    lora = f"{{rank=3, alpha=6, targets={EVERY}}}".replace("'", '"')
    (verdict,) = make_prover("fp64", model__lora=lora).prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, verdict
    assert verdict.max_grad_diff <= 1e-12


@pytest.mark.parametrize("layout", thinned(["fsdp=2,micro=2", "tp=2,micro=4,recompute=full"], 2))
def test_memory_and_traffic_of_dora_are_what_is_predicted(layout: str) -> None:
    lora = Lora(kind="dora", rank=8, alpha=16, targets=EVERY)
    workload = replace(ask(layout, {"layers": 4}, precision="bf16", batch=8), lora=lora)
    assert dryrun(workload, 0).differences(0) == []


def test_an_8b_in_four_bits_is_planned_within_16_gib() -> None:
    workload = Workload(
        PRESETS["llama3-8b"],
        find("1xH100"),
        Recipe(seq=4096, batch=16, steps=1, precision="bf16"),
        Layout.parse("micro=1,recompute=full"),
        lora=Lora(rank=16, alpha=32, targets=EVERY, base="nf4"),
    )
    assert ledger(workload).device_p90 < 16 * 2**30


@pytest.mark.parametrize(
    ("layout", "targets", "precision"), thinned(MEMORY, 8), ids=lambda value: str(value).replace("_proj", "")
)
def test_memory_is_what_is_predicted(layout: str, targets: list[str], precision: str) -> None:
    workload = replace(
        ask(layout, {"layers": 4}, precision=precision, batch=8), lora=Lora(rank=8, alpha=16, targets=targets)
    )
    for stage in {0, workload.layout.pp - 1}:
        seen = dryrun(workload, first_rank(workload.layout, stage))
        assert seen.differences(0) == []


DROPPED = [
    ("micro=4", EVERY, "bf16"),
    ("pp=2,micro=1,schedule=zb", EVERY, "bf16"),
    ("tp=2,sp=0,micro=2,recompute=full", EVERY, "bf16"),
    ("fsdp=2,micro=2", ["q_proj", "v_proj"], "bf16"),
    ("pp=2,micro=1,recompute=full", ["down_proj"], "fp32"),
    ("micro=4,recompute=selective", ["up_proj"], "bf16"),
    ("dp=2,micro=2", ["o_proj"], "bf16"),
]


@pytest.mark.parametrize(
    ("layout", "targets", "precision"), thinned(DROPPED, 4), ids=lambda value: str(value).replace("_proj", "")
)
def test_memory_and_traffic_with_dropout_are_what_is_predicted(
    layout: str, targets: list[str], precision: str
) -> None:
    lora = Lora(rank=8, alpha=16, targets=targets, dropout=0.1)
    workload = replace(ask(layout, {"layers": 4}, precision=precision, batch=8), lora=lora)
    for stage in {0, workload.layout.pp - 1}:
        assert dryrun(workload, first_rank(workload.layout, stage)).differences(0) == []


@pytest.mark.parametrize("layout", thinned(LAYOUTS, 4))
def test_no_layout_changes_the_run(make_prover: Callable[..., Prover], layout: str) -> None:
    lora = f"{{rank=3, alpha=6, targets={EVERY}}}".replace("'", '"')
    prover = make_prover("fp64", model__lora=lora)
    (verdict,) = prover.prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, verdict
    assert verdict.max_grad_diff <= 1e-12


OF_DORA = ("dp=2,micro=2", "fsdp=2", "tp=2,recompute=full", "tp=4,sp=0", "pp=2", "fsdp=2,tp=2")


@pytest.mark.parametrize("layout", thinned(OF_DORA, 3))
def test_no_layout_changes_a_run_of_dora(make_prover: Callable[..., Prover], layout: str) -> None:
    lora = f'{{kind="dora", rank=3, alpha=6, targets={EVERY}}}'.replace("'", '"')
    (verdict,) = make_prover("fp64", model__lora=lora).prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, verdict
    assert verdict.max_grad_diff <= 1e-12


# Whatever cuts tokens, rows or features: the masks of what adapters read are cut with them.
OF_DROPOUT = (
    "dp=2,micro=1",
    "fsdp=2,recompute=full",
    "tp=2",
    "tp=4,sp=0,recompute=selective",
    "cp=2",
    "pp=2",
)


@pytest.mark.parametrize("layout", thinned(OF_DROPOUT, 3))
def test_no_layout_changes_a_run_with_dropout(make_prover: Callable[..., Prover], layout: str) -> None:
    lora = f"{{rank=3, alpha=6, dropout=0.2, targets={EVERY}}}".replace("'", '"')
    prover = make_prover("fp64", model__lora=lora, recipe__dropout=0)
    (verdict,) = prover.prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, verdict
    assert verdict.max_grad_diff <= 1e-12


# Tensor ranks cut no block of 64 values: with tp=2 rows of 128 are two of them.
BLOCKS_OF_64 = {
    "layers": 2,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "ffn": 128,
    "vocab": 265,
}
OF_QLORA = (
    "dp=2,micro=2",
    "fsdp=2,recompute=selective",
    "fsdp=2,offload=params",
    "tp=2,recompute=full",
    "fsdp=2,offload=params@nvme",
    "tp=2,offload=params@nvme",
    "pp=2",
    "fsdp=2,tp=2",
)


@pytest.mark.parametrize("layout", thinned(OF_QLORA, 3))
def test_no_layout_changes_a_run_of_qlora(
    make_prover: Callable[..., Prover], tmp_path: Path, layout: str
) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(write_config(PRESETS["tiny"].model_copy(update=BLOCKS_OF_64))))
    lora = f'{{base="nf4", kind="dora", rank=3, alpha=6, targets={EVERY}}}'.replace("'", '"')
    (verdict,) = (
        make_prover("fp64", model__lora=lora, model__path=str(shape)).prove([Layout.parse(layout)]).verdicts
    )
    assert verdict.ok, verdict
    assert verdict.max_grad_diff <= 1e-12


def test_strict_mode_is_equal_to_the_bit(make_prover: Callable[..., Prover]) -> None:
    lora = "{rank=3, alpha=6}"
    prover = make_prover("fp32", model__lora=lora, run__strict="true", recipe__dropout=0)
    (verdict,) = prover.prove([Layout.parse("fsdp=2,pp=2")]).verdicts
    assert verdict.bit_identical, verdict


# Few targets matter where a first block exchanges something before there is an adapter.
CASES = [(layout, (ATTENTION, EVERY)[number % 2]) for number, layout in enumerate(TRAFFIC)]
CASES += [
    (layout, [target])
    for layout in ("tp=2", "tp=2,sp=0,pp=2", "cp=2", "cp=2,cp_kind=ulysses")
    for target in ("k_proj", "o_proj", "down_proj")
]


@pytest.mark.parametrize(
    ("layout", "targets"), thinned(CASES, 6), ids=lambda value: str(value).replace("_proj", "")
)
def test_traffic_is_what_is_predicted(layout: str, targets: list[str]) -> None:
    plain = ask(layout, {"layers": 4, "hidden": 64, "heads": 4, "head_dim": 16, "ffn": 96}, batch=8, seq=64)
    workload = replace(plain, lora=Lora(rank=8, alpha=16, targets=targets))
    for stage in {0, workload.layout.pp - 1}:
        seen = dryrun(workload, first_rank(workload.layout, stage))
        assert seen.traffic == seen.predicted_traffic
        held, said = seen.memory, seen.predicted
        # Adapters alone have gradients and states; what is frozen rests in the compute precision.
        assert held.params == pytest.approx(said.params, rel=1e-3)
        assert held.optimizer == pytest.approx(said.optimizer, rel=1e-2)
