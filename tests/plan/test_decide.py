"""The decision in words: what to run, and when not to distribute."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.planning import answered

from shoal.plan.decide import duration


def test_it_says_what_to_run_with_numbers() -> None:
    found = answered("llama3-8b", "8xH100")
    plan = found.choice
    assert plan is not None and plan.runs
    text = found.decision.text
    assert text.startswith(f"Run {plan.layout}: ")
    assert f"{plan.tokens_per_s_per_gpu:,.0f} tokens/s a GPU" in text and f"MFU {plan.mfu:.1%}" in text
    assert "DDP" in text and found.decision.distribute


def test_all_weights_do_not_fit_one_gpu_but_lora_does() -> None:
    reasons = answered("llama3-8b", "8xH100").decision.reasons
    assert any("LoRA would do: rank 16 fits one GPU" in reason for reason in reasons)
    assert not any(
        "LoRA would do" in reason for reason in answered("llama3-8b", "8xH100", lora=16).decision.reasons
    )


@pytest.mark.parametrize(
    ("tokens", "said", "distribute"),
    [
        ("20M", "The job is short", False),
        ("2B", "under 24 h", False),
        ("1T", "but would take", True),
        (None, "It fits one GPU", True),
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
    decision = answered("llama3.2-1b", str(file), 512, 8).decision
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
    assert f"The smallest change that makes it fit: {found.remedies[0]}." in found.decision.text


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


def test_of_two_that_are_as_fast_the_simpler_is_run() -> None:
    found = answered("llama3-8b", "8xH100")
    chosen = found.choice
    assert chosen is not None
    for other in found.plans:
        if other.runs and other.step.seconds < chosen.step.seconds:
            axes = [sum(degree > 1 for degree in plan.layout.degrees.values()) for plan in (chosen, other)]
            assert chosen.step.seconds <= other.step.seconds * 1.02 and axes[0] <= axes[1]
            assert found.plans[0].runs is False or "faster, but" in found.decision.text
