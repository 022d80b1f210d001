"""Long sequences are answered with context ranks, many experts with expert ranks; and the answers run."""

from __future__ import annotations

import pytest
from tests.plan.planning import answered

from shoal.facts.layout import Layout


def test_long_sequences_are_cut_over_ranks() -> None:
    found = answered("llama3-8b", "64xH100", seq=131_072, batch=8)
    chosen = found.chosen
    assert chosen is not None and chosen.plan.layout.cp > 1
    assert chosen.plan.mfu > 0.3


@pytest.mark.long
def test_405b_at_128k_tokens_on_16384_gpus() -> None:
    """A step of 16M tokens has 128 sequences: without context parallelism only 128 of 16,384 GPUs would have one."""
    found = answered("llama3-405b", "16384xH100", seq=131_072, batch=128)
    chosen = found.chosen
    assert chosen is not None and chosen.plan.layout.cp > 1
    assert chosen.plan.mfu > 0.25
    assert found.plans[0].mfu > 0.3 and found.plans[0].layout.cp > 1


@pytest.mark.long
def test_many_experts_are_spread_over_ranks() -> None:
    found = answered("deepseek-v3", "2048xH100", seq=4096, batch=15_360)
    chosen = found.chosen
    assert chosen is not None and chosen.plan.layout.ep > 1
    assert Layout.parse(str(chosen.plan.layout)) == chosen.plan.layout
