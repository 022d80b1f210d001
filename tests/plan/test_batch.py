"""Whether the batch is the limit: other batches are tried, and named with what they bring."""

from __future__ import annotations

import pytest
from tests.plan.planning import answered, asked, judged

from shoal.facts.layout import Layout
from shoal.plan.batch import batch_advice, near
from shoal.plan.judge import judge


@pytest.mark.parametrize(
    ("batch", "devices", "offered"),
    [(100, 64, [96, 128]), (1, 64, [64]), (65, 64, [64, 96]), (7, 3, [6, 9]), (130, 64, [128, 160])],
)
def test_the_nearest_that_are_shared_out(batch: int, devices: int, offered: list[int]) -> None:
    assert near(batch, devices) == offered


def test_a_batch_of_one_is_the_limit() -> None:
    found = answered("llama3-8b", "64xH100", 8192, 1)
    advice = found.decision.batch
    assert advice is not None and advice.text in found.decision.reasons
    assert "the batch is the limit" in advice.text
    assert [offer.batch for offer in advice.offers] == [64] and advice.offers[0].gain > 1
    assert advice.fewer is not None and advice.fewer.devices == 8
    share = advice.fewer.plan.tokens_per_s / (found.choice.tokens_per_s if found.choice else 1)
    assert f"do {share:.0%} of what 64 do" in advice.text


def test_devices_that_share_sequences_though_memory_would_not_make_them() -> None:
    """Eight sequences on 64 GPUs: each of four data ranks has two, enough for its stages, and memory stays free."""
    found = answered("llama3-8b", "64xH100", 8192, 8)
    advice = found.decision.batch
    assert advice is not None and [offer.batch for offer in advice.offers] == [64]
    assert advice.offers[0].gain > 0.4
    assert not any("network" in reason for reason in found.decision.reasons)


def test_a_hundred_sequences_become_96_or_128() -> None:
    found = answered("llama3-8b", "64xH100", 8192, 100)
    advice = found.decision.batch
    assert advice is not None and [offer.batch for offer in advice.offers] == [96, 128]
    assert all(offer.gain > 0.1 for offer in advice.offers)
    offers = found.as_json()["decision"]["batch"]["offers"]
    assert [offer["batch"] for offer in offers] == [96, 128] and all(offer["layout"] for offer in offers)


def test_a_batch_that_needs_no_pipeline_is_offered_though_it_is_no_faster() -> None:
    found = answered("llama3-8b", "8xH100", 8192, 100)
    advice = found.decision.batch
    assert found.choice is not None and found.choice.layout.pp > 1
    assert advice is not None and [offer.batch for offer in advice.offers] == [96, 104]
    assert [offer.plan.layout.fsdp for offer in advice.offers] == [8, 8]
    assert all(abs(offer.gain) < 0.02 for offer in advice.offers)


def test_a_batch_is_no_limit_where_another_is_shared_out_no_further() -> None:
    """GPT-3 takes 64 GPUs whatever the batch, and 96 sequences for each 64 are enough of them."""
    layout = "fsdp=16,zero=1,tp=8,pp=8,schedule=interleaved,micro=3"
    request = asked("gpt3-175b", "1024xA100-80GB", 2048, 1536, stack="megatron")
    plan = judge(request.workload(Layout.parse(layout)))
    assert 1536 not in near(1536, 1024) and batch_advice(request, plan) is None


@pytest.mark.parametrize(("on", "batch", "offered"), [("8xH100", 3, [8]), ("48xH100", 64, [48, 72])])
def test_a_batch_that_few_data_ranks_share_is_the_limit(on: str, batch: int, offered: list[int]) -> None:
    """Tensor, context and pipeline ranks fill the memory that such a batch leaves, so that it is not free memory
    that tells.
    """
    advice = answered("llama3-8b", on, 4096 if batch == 3 else 8192, batch).decision.batch
    assert advice is not None and {offer.batch for offer in advice.offers} <= set(offered)
    assert all(
        offer.gain > 0.1 and offer.plan.layout.data_ranks > advice.data_ranks for offer in advice.offers
    )


def test_on_thousands_of_devices_another_batch_is_named() -> None:
    advice = answered("llama3-8b", "2048xH100", 8192, 8).decision.batch
    assert advice is not None and advice.offers == []
    assert "the batch is the limit. Better: a batch of 2048." in advice.text


def test_a_batch_that_is_no_limit_is_not_mentioned() -> None:
    assert answered("llama3-8b", "8xH100").decision.batch is None


def test_a_giant_shares_devices_whatever_the_batch() -> None:
    """Llama 3's: 16 sequences for each pipeline of 16 stages, of 128 pipelines."""
    plan = judged("fsdp=128,tp=8,pp=16,recompute=full", "llama3-405b", "16384xH100", 8192, 2048)
    request = asked("llama3-405b", "16384xH100", 8192, 2048)
    assert plan.vs_ddp < 0.9 and batch_advice(request, plan) is None


def test_long_sequences_are_cut_and_the_batch_is_no_limit() -> None:
    found = answered("llama3-8b", "64xH100", 131072, 8)
    assert found.choice is not None and found.choice.layout.cp > 1 and found.decision.batch is None
