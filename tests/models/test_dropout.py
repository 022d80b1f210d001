from __future__ import annotations

import pytest
import torch

from shoal.models import random
from shoal.models.dropout import Dropout
from shoal.models.random import key, signed

NOISE = torch.tensor([5, 77, -3, 2**62])
POSITIONS = torch.arange(10).expand(4, 10)
ONES = torch.ones(4, 10, 256)


def test_keeps_the_mean_and_drops_the_share() -> None:
    dropped = Dropout("site", 0.25)(ONES, POSITIONS, NOISE)
    assert set(dropped.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert abs(float((dropped == 0).double().mean()) - 0.25) < 0.02


def test_the_mask_does_not_depend_on_how_the_batch_is_cut() -> None:
    site = Dropout("site", 0.5)
    whole = site(ONES, POSITIONS, NOISE)
    for row in range(4):
        alone = site(ONES[row : row + 1], POSITIONS[row : row + 1], NOISE[row : row + 1])
        assert torch.equal(alone[0], whole[row])
    assert torch.equal(site(ONES[:, 6:], POSITIONS[:, 6:], NOISE), whole[:, 6:])


def test_sites_rows_and_positions_differ() -> None:
    site = Dropout("site", 0.5)
    whole = site(ONES, POSITIONS, NOISE)

    def agreement(left: torch.Tensor, right: torch.Tensor) -> float:
        return float((left == right).double().mean())

    pairs = [
        (whole, Dropout("other", 0.5)(ONES, POSITIONS, NOISE)),
        (whole, site(ONES, POSITIONS, NOISE + 1)),
        (whole[:1], whole[1:2]),
        (whole[:, 1:], whole[:, :-1]),
    ]
    for left, right in pairs:
        assert abs(agreement(left, right) - 0.5) < 0.03


def test_identity_without_noise_or_without_probability() -> None:
    assert Dropout("site", 0.5)(ONES, POSITIONS, None) is ONES
    assert Dropout("site", 0.0)(ONES, POSITIONS, NOISE) is ONES


def test_keeps_the_dtype() -> None:
    assert Dropout("site", 0.1)(ONES.bfloat16(), POSITIONS, NOISE).dtype == torch.bfloat16


def splitmix64(key: int, index: int) -> int:
    """In whole numbers, as it is published; signed like torch's."""
    state = (key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return signed(state ^ (state >> 31))


def test_the_mask_is_the_published_hash() -> None:
    """Runs that began with another version go on with the same masks."""
    site = Dropout("site", 0.1)
    x = torch.ones(2, 3, 5, dtype=torch.float64)
    dropped = site(x, torch.tensor([[0, 1, 2], [7, 8, 9]]), NOISE[:2])
    salt = key(0, 0, "site")
    for row, positions in enumerate(([0, 1, 2], [7, 8, 9])):
        for column, position in enumerate(positions):
            token = splitmix64(int(NOISE[row]) ^ salt, position)
            kept = [splitmix64(token, feature) >= int(0.1 * 2**64) - 2**63 for feature in range(5)]
            assert dropped[row, column].tolist() == [1 / 0.9 * one for one in kept]


def test_the_gradient_is_dropped_and_scaled_as_the_value() -> None:
    x = torch.randn(4, 10, 256, dtype=torch.float64).requires_grad_()
    dropped = Dropout("site", 0.3)(x, POSITIONS, NOISE)
    (gradient,) = torch.autograd.grad(dropped, x, torch.full_like(x, 2.0))
    assert torch.equal(gradient, (dropped != 0) * (2.0 * torch.tensor(1 / 0.7, dtype=torch.float64)))


def test_parts_make_the_whole_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Dropout("site", 0.5)(ONES, POSITIONS, NOISE)
    monkeypatch.setattr(random, "CHUNK_CPU", 3 * 256)
    assert torch.equal(Dropout("site", 0.5)(ONES, POSITIONS, NOISE), whole)


def test_compiled_it_drops_the_same() -> None:
    x = torch.randn(4, 10, 256).requires_grad_()
    site = Dropout("site", 0.3)
    compiled = torch.compile(site, backend="aot_eager", fullgraph=True, dynamic=False)
    results = []
    for run in (site, compiled):
        dropped = run(x, POSITIONS, NOISE)
        results.append((dropped, *torch.autograd.grad(dropped, x, x.detach())))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
