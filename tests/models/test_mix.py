"""Rows gathered and added up, and products that add up wide, against plain torch."""

from __future__ import annotations

import pytest
import torch

from shoal.models.mix import mix_rows, spread_rows
from shoal.models.wide_product import add_product_, wide_product


@pytest.mark.parametrize("weighted", [False, True])
def test_each_token_gets_its_own_results(weighted: bool) -> None:
    tokens, copies, width = 5, 3, 4
    results = torch.randn(tokens * copies, width, dtype=torch.float64)
    back = torch.randperm(tokens * copies)
    weights = torch.rand(tokens, copies, dtype=torch.float64) if weighted else None
    expected = torch.zeros(tokens, width, dtype=torch.float64)
    for token in range(tokens):
        for copy in range(copies):
            weight = 1.0 if weights is None else weights[token, copy]
            expected[token] += weight * results[back[token * copies + copy]]
    torch.testing.assert_close(mix_rows(results, back, copies, weights), expected)
    torch.library.opcheck(torch.ops.shoal.mix.default, (results, back, copies, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_add_up_wide(dtype: torch.dtype) -> None:
    parts = [(torch.randn(6, 40).to(dtype), torch.randn(40, 5).to(dtype)) for _ in range(3)]
    total = wide_product(*parts[0])
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    for left, right in parts[1:]:
        add_product_(total, left, right)
    exact = sum(left.double() @ right.double() for left, right in parts)
    near = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert isinstance(exact, torch.Tensor)
    torch.testing.assert_close(total.double(), exact, rtol=near, atol=near * 10)
    torch.library.opcheck(torch.ops.shoal.add_product_.default, (total, *parts[0]))


def test_copies_of_tokens_are_where_their_experts_are() -> None:
    tokens, copies, width = 5, 3, 4
    x, back = torch.randn(tokens, width), torch.randperm(tokens * copies)
    place = back.argsort()
    for there in (tokens * copies, 11):
        spread = spread_rows(x, place[:there], back, copies)
        assert spread.shape == (there, width)
        for token in range(tokens):
            for copy in range(copies):
                if (row := int(back[token * copies + copy])) < there:
                    assert torch.equal(spread[row], x[token])
    torch.library.opcheck(torch.ops.shoal.spread.default, (x, place, back, copies))
