from __future__ import annotations

import torch

from shoal.models.dropout import Dropout

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
