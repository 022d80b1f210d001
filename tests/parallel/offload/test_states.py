"""Optimizer states that the host has: real ranks against one process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.parallel.sharding import GPT2, Case, assert_equal, train
from tests.predict.counted import ask
from tests.ranks import run_ranks
from tests.thinned import thinned

from shoal.facts.layout import Layout
from shoal.parallel.offload.host_memory import HostBuffer
from shoal.parallel.offload.states import SQUARED_PART, LandingBuffer, OffloadedStates, summed_squares
from shoal.prove.dryrun import dryrun

ALONE = [
    Case("offload=optimizer", micro_batches=1),
    Case("offload=optimizer", {"tied": True}),
    Case("offload=optimizer:0.5", GPT2, micro_batches=4),
]
WORLD_2 = [
    Case("dp=2,offload=optimizer"),
    Case("fsdp=2,offload=optimizer"),
    Case("fsdp=2,offload=optimizer:0.5", {"tied": True}),
    Case("fsdp=2,zero=2,offload=optimizer"),
    Case("fsdp=2,zero=2,offload=optimizer:0.4", {"tied": True}, micro_batches=4),
    Case("fsdp=2,zero=1,offload=optimizer"),
    Case("tp=2,offload=optimizer"),
    Case("tp=2,sp=0,offload=optimizer:0.5", {"tied": True}),
    Case("pp=2,offload=optimizer", {"tied": True}, micro_batches=4),
    Case("pp=2,schedule=zbv,offload=optimizer:0.5", micro_batches=4),
]
WORLD_4 = [
    Case("dp=2,fsdp=2,offload=optimizer"),
    Case("dp=2,fsdp=2,zero=2,offload=optimizer"),
    Case("fsdp=2,tp=2,offload=optimizer:0.7", {"tied": True}),
    Case("fsdp=2,zero=2,tp=2,offload=optimizer"),
    Case("fsdp=2,pp=2,offload=optimizer", micro_batches=2),
]


@pytest.mark.parametrize("case", thinned([*ALONE, *WORLD_2, *WORLD_4], 2), ids=lambda case: case.layout)
def test_a_layout_equals_one_process(case: Case) -> None:
    assert_equal(case, run_ranks(Layout.parse(case.layout).world, train, case))


def test_a_head_alone_on_the_host_arrives_in_large_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block has anything there, whose size would otherwise be that of a part."""
    copy, parts = OffloadedStates._copy, []
    monkeypatch.setattr(
        OffloadedStates,
        "_copy",
        lambda self, part, *rest: parts.append(part.numel()) or copy(self, part, *rest),
    )
    found = dryrun(ask("micro=2,offload=optimizer:0.3", {"layers": 2, "vocab": 30000}, batch=8), 0)
    assert found.differences(0) == []
    assert parts and min(parts) > 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 5, 20 * SQUARED_PART + 3])
def test_squares_are_summed_without_widening_the_whole_gradient(dtype: torch.dtype, size: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.profiler.profile(profile_memory=True) as seen:
        found = summed_squares(gradient)
    assert float(found) == pytest.approx(float(gradient.double().square().sum()), rel=1e-3)
    if dtype == torch.bfloat16:
        # A sum of 1.3 million squares in fp32 is off by 1e-4.
        assert float(found) == pytest.approx(float(gradient.double().square().sum()), rel=1e-5)
        assert max(event.cpu_memory_usage for event in seen.events()) <= 4 * SQUARED_PART


def test_what_has_landed_is_read_before_its_place_is_taken_again() -> None:
    """Parts of all sizes through a small ring; a reader that lags behind sees each as it arrived."""
    ring = LandingBuffer(HostBuffer(torch.empty(256, dtype=torch.uint8)))
    reader, seen = ThreadPoolExecutor(1), []

    def read(landed: torch.Tensor) -> None:
        time.sleep(0.001)
        seen.append(landed.clone())

    sizes = [(7 * number) % ring.most + 1 for number in range(60)]
    for number, size in enumerate(sizes):
        landed = ring.take(size)
        landed.fill_(number)
        ring.taken(reader.submit(read, landed))
    reader.shutdown()
    assert [(part.numel(), set(part.tolist())) for part in seen] == [
        (size, {number}) for number, size in enumerate(sizes)
    ]
