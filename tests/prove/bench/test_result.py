"""Medians, ratios and the verdict on losses; the plain peer's own loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.facts.config.file import load
from shoal.plan.resolve import resolve
from shoal.prove.bench.peers import plain_pytorch
from shoal.prove.bench.result import PeerResult, StepBench, bootstrap


def result(name: str, rounds: list[list[float]], losses: list[float], **others: Any) -> PeerResult:
    return PeerResult(name, f"what {name} is", {}, rounds, losses, None, None, 1.0, **others)


@pytest.fixture
def bench() -> StepBench:
    job = resolve(load(None, ["cluster.on=1xcpu", "recipe.batch=4", "recipe.seq=8"], "dp=1").config)
    ours = result("shoal", [[0.1, 0.2, 0.3], [0.4, 0.4, 0.4]], [5.0, 4.0])
    same = result("pytorch", [[0.4, 0.4, 9.0], [0.4, 0.4, 0.4]], [5.0001, 4.0])
    other = result("transformers", [[0.1], [0.2]], [5.0, 3.9])
    failed = result("fabric", [], [], failure="rank 0: no")
    return StepBench(job, [ours, same, other, failed], 2, 3, 2, True)


def test_medians_and_paired_ratios(bench: StepBench) -> None:
    ours, same, _, _ = bench.results
    assert ours.medians == [0.2, 0.4] and ours.step_s == pytest.approx(0.3)
    assert bench.tokens_per_s(ours) == pytest.approx(32 / 0.3)
    ratio = bench.ratio(same)
    assert ratio is not None and ratio[0] == pytest.approx(1.5)  # 2 in the first round, 1 in the second
    assert bench.ratio(ours) is None


def test_a_peer_that_trains_something_else_is_marked(bench: StepBench) -> None:
    ours, same, other, failed = bench.results
    assert bench.agrees(ours) and bench.agrees(same) and not bench.agrees(other)
    assert bench.loss_difference(other) == pytest.approx(0.025)
    rows = {row["name"]: row for row in bench.document()["peers"]}
    assert rows["transformers"]["agrees"] is False and "tokens_per_s" not in rows["fabric"]
    assert bench.ok and failed not in bench.measured


def test_without_shoal_the_first_peer_is_the_reference(bench: StepBench) -> None:
    alone = replace(bench, results=bench.results[1:])
    assert alone.reference is alone.results[0] and alone.ratio(alone.results[1]) is None


def test_our_own_failure_is_the_commands(bench: StepBench) -> None:
    ours = result("shoal", [], [], failure="rank 0: no")
    assert not replace(bench, results=[ours, *bench.results[1:]]).ok


def test_the_interval_holds_the_median() -> None:
    assert bootstrap([2.0] * 5) == (2.0, 2.0)
    low, high = bootstrap([1.0, 1.1, 1.2, 1.3, 1.4])
    assert 1.0 <= low < 1.2 < high <= 1.4


def test_the_chunked_loss_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last chunk is shorter, and the loss is one of several micro-batches'."""
    monkeypatch.setattr(plain_pytorch, "CHUNK", 4)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    targets = torch.randint(0, 7, (10,))
    made = []
    for chunked in (True, False):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if chunked:
            loss = plain_pytorch.ChunkedCrossEntropy.apply(*inputs, targets, plain_pytorch.loss_and_gradient)
        else:
            loss = F.cross_entropy(inputs[0] @ inputs[1].T, targets)
        (loss / 2).backward()
        made.append([loss.detach().double(), *(one.grad for one in inputs)])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
