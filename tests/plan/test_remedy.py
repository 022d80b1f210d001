"""Remedies that change the run: states in fewer bits, adapters, frozen weights in 4 bits."""

from __future__ import annotations

from shoal.facts.layout import Layout
from shoal.plan.judge import ask
from shoal.plan.remedy import Remedy, for_layout, for_model, on_these
from shoal.plan.request import PlanRequest, plan_request


def named(remedies: list[Remedy]) -> dict[str, Remedy]:
    return {remedy.what.split(",")[0].split(" ")[0]: remedy for remedy in remedies}


def asked(model: str, on: str, lora: int | None = None, seq: int = 2048, **more: str) -> PlanRequest:
    return plan_request(model, on, seq=seq, batch=8, lora=lora, **more)


def test_leaner_states_fit_an_8b_on_one_gpu_without_offload() -> None:
    found = named(on_these(asked("llama3-8b", "1xH100", seq=4096), resting=True))
    assert {"states=bf16", "states=int8", "LoRA", "QLoRA"} <= found.keys()
    for remedy in found.values():
        assert remedy.plan.fits and remedy.plan.runs and not remedy.plan.layout.offload
    assert found["states=int8"].plan.workload.recipe.states == "int8"
    assert "--states bf16" in found["states=bf16"].plan.command


def test_qlora_where_lora_does_not_fit() -> None:
    request = asked("llama3-70b", "1xH100", lora=16)
    found = named(on_these(request, resting=True))
    assert found.keys() == {"QLoRA"}
    adapters = found["QLoRA"].plan.workload.lora
    assert adapters is not None and (adapters.rank, adapters.base) == (16, "nf4")
    words = ask(found["QLoRA"].plan.workload).split()
    assert words[words.index("--lora") :] == ["--lora", "16", "--nf4"]
    again = plan_request("llama3-70b", "1xH100", seq=2048, batch=8, lora=16, nf4=True)
    assert again.lora == adapters


def test_they_are_offered_where_nothing_fits_and_for_a_layout() -> None:
    small = asked("llama2-7b", "1xT4")
    assert {"LoRA", "QLoRA"} & named(for_model(small)).keys()
    wide = asked("llama3-8b", "1xH100", seq=4096)
    assert "states=int8" in named(for_layout(wide, Layout.parse("micro=1,recompute=full")))


def test_what_is_lean_already_is_not_offered_again() -> None:
    lean = asked("llama3-8b", "1xRTX4090", states="bf16")
    assert not any(what.startswith("states") for what in named(on_these(lean)))
