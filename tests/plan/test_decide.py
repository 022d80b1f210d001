"""The decision in words: what to run, and when not to distribute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.plan.planning import answered

from shoal.plan.decide import duration
from shoal.plan.report import plan_report
from shoal.plan.request import plan_request


def test_it_says_what_to_run_with_numbers() -> None:
    found = answered("llama3-8b", "8xH100")
    plan = found.choice
    assert plan is not None and plan.runs
    text = found.decision.text
    assert text.startswith(f"Run {plan.layout}: ")
    assert f"{plan.tokens_per_s_per_gpu:,.0f} tokens/s/GPU" in text and f"MFU {plan.mfu:.1%}" in text
    assert "DDP" in text and found.decision.distribute


def test_all_weights_do_not_fit_one_gpu_but_lora_does() -> None:
    reasons = answered("llama3-8b", "8xH100").decision.reasons
    assert any("LoRA with rank 16 fits on one GPU" in reason for reason in reasons)
    assert not any(
        "LoRA would do" in reason for reason in answered("llama3-8b", "8xH100", lora=16).decision.reasons
    )


@pytest.mark.parametrize(
    ("tokens", "said", "distribute"),
    [
        ("20M", "The job is short", False),
        ("2B", "only if you cannot wait a day", False),
        ("1T", "but takes", True),
        (None, "It fits on one GPU", True),
    ],
)
def test_what_fits_one_gpu_need_not_be_distributed(tokens: str | None, said: str, distribute: bool) -> None:
    decision = answered("llama3.2-1b", "8xH100", 2048, 64, tokens=tokens).decision
    assert any(said in reason for reason in decision.reasons), decision
    assert decision.distribute is distribute


def test_links_that_are_too_slow(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(
        'device = "RTX4090"\nnodes = 2\ndevices_per_node = 1\n[network]\nbandwidth = 12.5e6\nlatency = 1e-3\n'
    )
    decision = answered("gpt2", str(file), 512, 8).decision
    assert not decision.distribute
    assert any("slower than one" in reason and "links are too slow" in reason for reason in decision.reasons)


def test_one_gpu_has_nothing_to_distribute() -> None:
    decision = answered("llama3.2-1b", "1xH100", 2048, 8).decision
    assert not decision.distribute and "one GPU" in decision.text


def test_very_short_steps_ask_for_ready_data() -> None:
    reasons = answered("tiny", "1xH100", 128, 16).decision.reasons
    assert any("tokenise ahead" in reason for reason in reasons)


def test_a_layout_that_does_not_fit_is_said_to_and_how_it_would() -> None:
    found = answered("llama3-8b", "8xH100", layout="dp=8,micro=8")
    assert found.decision.text.startswith("dp=8,micro=8 does not fit: ")
    assert f"Smallest change that fits: {found.remedies[0]}." in found.decision.text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0381, "38.1 ms"),
        (1.244, "1.24 s"),
        (1800, "30 minutes"),
        (3 * 3600, "3 h"),
        (12 * 86400, "12 days"),
        (500 * 365.25 * 86400, "500 years"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_reason_names_what_cannot_be_told_apart_and_what_is_saved() -> None:
    found = answered("llama3-8b", "8xH100", 8192, 64)
    assert found.chosen is not None
    chosen, fastest = found.chosen.plan, found.chosen.fastest
    assert chosen.layout.degrees["fsdp"] == 8 and chosen.layout.pp == 1
    assert (
        "fsdp=4,unit=4,pp=2,schedule=interleaved,chunks=8,micro=1, is predicted to be" in found.decision.text
    )
    assert fastest.error_bar > fastest.told_apart == 0.1
    assert "within the 10% that predictions cannot tell apart" in found.decision.text
    assert "this one needs no unit, pp, schedule or chunks" in found.decision.text
    assert found.chosen.why in found.decision.text
    document = found.as_json()["chosen"]
    assert document["layout"] == str(chosen.layout) == found.as_json()["choice"]
    assert document["fastest"] == str(fastest.layout) and found.chosen.why in document["why"]


@pytest.mark.usefixtures("without_params")
def test_what_is_faster_and_not_run_yet_is_named_and_not_chosen() -> None:
    found = answered.__wrapped__("llama2-13b", "1xA100-40GB", 4096, 16)
    chosen, fastest = found.choice, found.plans[0]
    assert chosen is not None and chosen.runs and not fastest.runs
    said = f"{fastest.layout} is predicted to be "
    assert said in found.decision.text and said in found.as_json()["chosen"]["why"]
    assert f"but is priced but not run by the engine yet ({fastest.lacks})" in found.decision.text


@pytest.mark.usefixtures("without_params")
def test_where_nothing_that_runs_fits_nothing_is_chosen() -> None:
    found = answered.__wrapped__("llama3-70b", "2xA100-40GB", 4096, 16)
    assert found.chosen is None and found.nothing_runs
    planned = found.plans[0]
    assert planned.fits and not planned.runs and planned.layout.offload
    assert found.decision.text.startswith("No layout of llama3-70b on 2xA100-40GB that the engine runs fits")
    assert f"{planned.layout} would fit" in found.decision.text
    document = found.as_json()["chosen"]
    assert document["layout"] is None and document["runs"] is False and document["why"] == found.decision.text
    assert found.remedies[0].plan.runs, "what can be trained with now comes first"
    assert f"Smallest change that fits: {found.remedies[0]}" in found.decision.text


def test_a_batch_that_is_the_limit_is_said_to_be() -> None:
    reasons = answered("llama3-8b", "64xH100", 8192, 1).decision.reasons
    assert any("The batch of 1 is smaller than the 64 GPUs" in reason for reason in reasons)
    assert not any("The batch" in reason for reason in answered("llama3-8b", "8xH100").decision.reasons)


def test_seven_billion_parameters_on_one_card_wait_in_the_hosts_memory() -> None:
    asked = plan_request("llama2-7b", "1xRTX4090", seq=2048, batch=8)
    cluster = asked.cluster.model_copy(update={"host_memory": 2**38})
    found = plan_report(replace(asked, cluster=cluster))
    plan = found.choice
    assert plan is not None and plan.fits and plan.layout.offload[0].what == "optimizer"
    waiting = (
        f"{plan.memory.host / 2**30:,.0f} GiB in host memory (master weights, optimizer states and gradients"
    )
    assert f"Off the device wait, per node: {waiting}" in found.decision.text
    # What was assumed of the desktop is said; with half of it, the states go to its disks.
    assert "A host is taken to have 128 GiB for each GPU" in plan_report(asked).decision.text
    small = asked.cluster.model_copy(update={"host_memory": 2**36})
    assert "on NVMe" in plan_report(replace(asked, cluster=small)).decision.text


def test_what_waits_on_disks_is_told_from_what_waits_in_memory() -> None:
    layout = "recompute=full,offload=optimizer@nvme+params:0.5"
    asked = plan_request("llama2-7b", "1xRTX4090", seq=2048, batch=8, layout=layout)
    text = plan_report(asked).decision.text
    assert "GiB in host memory (gradients and new weights, weights of 50% of the parameters)" in text
    assert "GiB on NVMe (master weights and optimizer states)" in text
