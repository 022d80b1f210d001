"""NF4 against the paper's construction of its levels, and against an element by element computation."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.facts.nf4 import BLOCK, LEVELS, packed_width
from shoal.models.nf4 import PackedProduct, pack, unpack
from shoal.parallel.compile import keep_for_none


def test_the_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Eight of the positive half and seven of the negative one, from the middle of the last bin on; and zero."""
    last = 1 - 1 / 2 * (1 / 32 + 1 / 30)
    upper, lower = ([last + (0.5 - last) * i / count for i in range(count)] for count in (8, 7))
    found = (
        [NormalDist().inv_cdf(one) for one in upper] + [0.0] + [-NormalDist().inv_cdf(one) for one in lower]
    )
    assert sorted(one / found[0] for one in found) == pytest.approx(LEVELS, abs=1e-6)


def by_hand(row: list[float]) -> list[float]:
    found = []
    for start in range(0, len(row), BLOCK):
        block = row[start : start + BLOCK]
        scale = max(map(abs, block))
        found += [scale * min(LEVELS, key=lambda level: abs(level - one / (scale or 1.0))) for one in block]
    return found


def test_values_are_the_nearest_levels_of_their_blocks() -> None:
    rows = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    rows[2, 64:128] = 0
    packed = pack(rows)
    assert packed.shape == (5, packed_width(192)) and packed.dtype == torch.uint8
    assert torch.allclose(
        unpack(packed, torch.float64), torch.tensor([by_hand(row) for row in rows.tolist()]).double()
    )
    assert torch.equal(pack(unpack(packed, torch.float32)), packed)  # once packed, nothing changes
    # Parts of it, cut between blocks, are the same.
    part = unpack(pack(rows[1:3, 64:].contiguous()), torch.float32)
    assert torch.equal(part, unpack(packed, torch.float32)[1:3, 64:])


def test_many_rows_are_unpacked_some_at_a_time() -> None:
    rows = torch.randn(40, 1 << 16, generator=torch.Generator().manual_seed(0))
    packed = pack(rows)
    found = unpack(packed, torch.bfloat16)
    assert torch.equal(found[33], unpack(packed[33:34], torch.bfloat16)[0])


def in_a_block(*arguments: torch.Tensor) -> torch.Tensor:
    """As in a compiled one: what is kept is listed, and the rest is computed again."""
    found: torch.Tensor = checkpoint(
        PackedProduct.apply,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=keep_for_none,
    )
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_is_that_of_what_was_unpacked_and_keeps_bytes_alone(compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    packed, bias = pack(torch.randn(24, 128, generator=generator)), torch.randn(24, generator=generator)
    x = torch.randn(2, 3, 128, generator=generator).requires_grad_()
    kept: list[torch.Tensor] = []
    product = torch.compile(in_a_block, backend="aot_eager") if compiled else PackedProduct.apply
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        output = product(x, packed, bias)
    assert torch.uint8 in [one.dtype for one in kept]
    assert sum(one.nbytes for one in kept) <= packed.nbytes + x.nbytes * compiled
    expected = F.linear(x, unpack(packed, torch.float32), bias)
    torch.testing.assert_close(output, expected)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(gradient, wanted)
