"""Parity of modules that Shoal did not build: a plan that is right, and plans that are not."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.facts.problem import BadInput


class Attention(nn.Module):
    """Reads its number of heads off the shapes, as tensor ranks need it."""

    def __init__(self, width: int = 12, head: int = 3) -> None:
        super().__init__()
        self.head = head
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(head)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = [
            one(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(self.norm(split[0]), split[1], split[2], is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Taught(nn.Module):
    """Its plan is one of the user's own: of attention, an MLP and a norm that each rank sees some heads of."""

    tp_plan: ClassVar = {
        "blocks.*.query": "colwise",
        "blocks.*.key": "colwise",
        "blocks.*.value": "colwise",
        "blocks.*.norm": "replicated_with_grad_allreduce",
        "blocks.*.out": "rowwise",
        "head": "colwise_gather_output",
    }
    pp_plan: ClassVar = {"embed": "first", "blocks": "blocks", "head": "last"}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(12, 17)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        hidden = self.embed(tokens) * scale[:, None, None]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    return [(torch.randint(0, 17, (4, 7), generator=drawn), torch.rand(4, generator=drawn)) for _ in range(2)]


def test_a_plan_of_ones_own_is_proved() -> None:
    verdicts = shoal.parity(Taught, batches(), "tp=2;fsdp=2,micro=1,offload=optimizer;pp=2,micro=1")
    assert [one.layout for one in verdicts] == ["tp=2", "fsdp=2,micro=1,offload=optimizer", "pp=2,micro=1"]
    for one in verdicts:
        assert one.ok, one
        assert one.max_grad_diff <= 1e-12 and one.max_param_diff <= 1e-12 and len(one.losses) == 2


def test_a_plan_that_forgets_a_sum_is_named() -> None:
    """The loss of the first step is right, and so it is of any layout whose gradients are not."""
    wrong = {**Taught.tp_plan, "blocks.*.norm": "replicate"}
    (verdict,) = shoal.parity(Taught, batches()[:1], "tp=2", plan=wrong)
    assert not verdict.ok
    assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff > 1e-3
    assert "norm" in verdict.worst


def test_what_is_not_a_number_is_no_parity() -> None:
    """Of one row of one batch: a rank that has others, and losses before it, do not hide it."""
    first, (tokens, scale) = batches()
    broken = [first, (tokens, scale * torch.tensor([1, 1, 1, math.nan]))]
    (verdict,) = shoal.parity(Taught, broken, "dp=2")
    assert not verdict.ok and verdict.max_loss_diff == math.inf


def test_what_cannot_be_proved_is_said_before_anything_starts() -> None:
    with pytest.raises(BadInput, match="a layout and a batch"):
        shoal.parity(Taught, [], "tp=2")
    with pytest.raises(BadInput, match="did you mean"):
        shoal.parity(Taught, batches(), "ttp=2")
