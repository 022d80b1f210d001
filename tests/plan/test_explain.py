"""What binds, why losers lose, and the smallest changes that make something fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.planning import answered, asked, judged

from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.plan.explain import HELD, SPENT, against, binds, link, parts, strategy, why
from shoal.plan.remedy import for_layout
from shoal.plan.scale import best, resized


@pytest.mark.parametrize(
    "layout", ["fsdp=8,micro=1", "fsdp=2,tp=4,micro=2", "fsdp=2,pp=4,micro=1", "dp=8,offload=optimizer"]
)
def test_the_parts_of_a_step_add_up(layout: str) -> None:
    plan = judged(layout)
    found = parts(plan)
    assert sum(part.seconds for part in found) == pytest.approx(plan.step.seconds, rel=1e-6)
    assert sum(part.share for part in found) == pytest.approx(1, rel=1e-6)
    assert found == sorted(found, key=lambda part: -part.seconds)


def test_every_field_of_the_ledgers_has_words() -> None:
    plan = judged("fsdp=8,micro=1")
    assert sum(getattr(plan.memory, name) for name in HELD) == plan.memory.peak_allocated
    assert sum(getattr(plan.step, name) for name in SPENT) == pytest.approx(plan.step.seconds)


def test_a_group_waits_for_the_slowest_link_it_crosses() -> None:
    two_nodes = judged("fsdp=2,tp=8,micro=1", on="16xH100").workload
    assert link("tp", two_nodes) == "NVLink 4"
    assert link("fsdp", two_nodes) == "InfiniBand NDR 400 Gb/s"
    assert link("tp", judged("tp=8,micro=1", on="8xL40S").workload) == "PCIe 4.0 x16"


def test_what_binds() -> None:
    assert binds(judged("fsdp=8,micro=1,recompute=full")).startswith("computation ")
    assert binds(judged("dp=8,micro=8")).startswith("memory: ")
    shallow = binds(judged("pp=8,micro=16"))
    assert shallow.startswith(("memory", "pipeline bubble", "computation"))
    slow = judged("tp=16,micro=1", on="16xH100")
    assert any("tp over InfiniBand" in part.name for part in parts(slow)[:2])


def test_why_says_time_and_memory() -> None:
    said = why(judged("fsdp=8,micro=1"))
    assert said.startswith("Step time: computation ") and "GiB" in said
    assert "does not fit" in why(judged("dp=8,micro=8"))


def test_why_a_loser_loses() -> None:
    best_plan = judged("fsdp=8,micro=1,recompute=selective")
    slower = judged("fsdp=8,micro=1,recompute=full")
    assert against(judged("dp=8,micro=8"), best_plan).startswith("does not fit: ")
    said = against(slower, best_plan)
    assert "recomputation +" in said and (" slower: " in said or said.startswith("tie: "))
    assert against(best_plan, best_plan).startswith("tie: +0.0%")


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("dp=8", "DDP"),
        ("dp=1", "one GPU"),
        ("fsdp=8", "FSDP (ZeRO-3)"),
        ("fsdp=8,zero=2", "ZeRO-2"),
        ("dp=2,fsdp=4", "HSDP, FSDP (ZeRO-3) in groups of 4"),
        ("fsdp=2,tp=2,pp=2", "3D: FSDP (ZeRO-3) + tensor and sequence parallelism + pipeline (1f1b)"),
        ("fsdp=8,offload=optimizer+params", "FSDP (ZeRO-3) with offload of optimizer and params"),
    ],
)
def test_a_strategy_has_the_name_people_use(layout: str, name: str) -> None:
    assert strategy(Layout.parse(layout)) == name


@pytest.mark.parametrize(
    ("lora", "name"),
    [
        (Lora(), "LoRA on one GPU"),
        (Lora(kind="dora"), "DoRA on one GPU"),
        (Lora(base="nf4"), "QLoRA on one GPU"),
    ],
)
def test_adapters_have_the_name_people_use(lora: Lora, name: str) -> None:
    assert strategy(Layout(), lora) == name
    assert strategy(Layout(dp=8), lora) == name.replace("on one GPU", "with DDP")


def test_a_layout_that_does_not_fit_comes_with_changes_that_do() -> None:
    workload = asked("llama3-8b", "8xH100")
    layout = Layout.parse("fsdp=8,micro=8")
    assert not judged(str(layout)).fits
    remedies = for_layout(workload, layout)
    assert all(remedy.plan.fits for remedy in remedies)
    first = remedies[0]
    changed = {name for name, value in first.plan.layout if value != getattr(layout, name)}
    assert len(changed) == 1, "the smallest change comes first"
    words = [remedy.what for remedy in remedies]
    assert any(what.startswith("micro=") for what in words)
    assert any("recompute=full" in str(remedy.plan.layout) for remedy in remedies)
    assert any("LoRA" in what for what in words) or judged("fsdp=8,micro=8").memory.activations > 70 * 2**30
    assert all(f"{remedy.plan.memory.device_p90 / 2**30:.1f} of" in str(remedy) for remedy in remedies)


def test_of_single_changes_one_that_stays_on_the_device_with_room_comes_first() -> None:
    """Offload of the optimizer's states would be faster by 4 %, and selective recomputation leaves 1 GiB."""
    layout = Layout.parse("fsdp=8,tp=2")
    first = for_layout(asked("llama3-8b", "16xH100", 4096, 64), layout)[0].plan
    assert not first.layout.offload and first.out_of_memory < 0.001, first.layout


@pytest.mark.usefixtures("without_params")
def test_changes_that_the_engine_does_not_run_are_marked_and_come_last() -> None:
    workload = asked("llama3-8b", "1xH100", 4096, 8)
    remedies = for_layout(workload, Layout.parse("dp=1"))
    marks = ["; priced but not run by the engine yet" in str(remedy) for remedy in remedies]
    assert marks == [not remedy.plan.runs for remedy in remedies] == sorted(marks)
    assert True in marks and False in marks
    for remedy in remedies:
        away = any(part.what == "params" for part in remedy.plan.layout.offload)
        planned = away
        assert planned == (remedy.as_json()["support"] != "runs"), remedy


def test_a_model_that_fits_nowhere_is_told_how_many_gpus_would_do(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(
        "nodes = 1\ndevices_per_node = 2\nhost_memory = 4_000_000_000\n"
        "[device]\nname = 'small'\nmemory_bytes = 2_000_000_000\n"
        "peaks = {bf16 = 1e14}\nmemory_bandwidth = 1e12\n"
    )
    workload = asked("llama3.2-1b", str(file), seq=1024, batch=8)
    found = answered("llama3.2-1b", str(file), 1024, 8)
    assert not any(plan.fits for plan in found.plans)
    more = [
        remedy for remedy in found.remedies if remedy.what.endswith("GPUs") and "these" not in remedy.what
    ]
    assert len(more) == 1 and more[0].plan.fits and more[0].plan.world > 1
    assert "Nothing fits" in found.decision.text or "does not fit" in found.decision.text
    assert str(found.remedies[0]) in found.decision.text
    assert best(workload) is None
    fewer = resized(workload, more[0].plan.world - 2)
    assert fewer is None or best(fewer) is None
