from __future__ import annotations

import math

import pytest
import torch

from shoal.models import random

KEY = random.key(7, 0, "model.embed_tokens.weight")


def test_bits_are_splitmix64() -> None:
    # The published sequence from seed 0 and from 1234567.
    def sequence(seed: int) -> list[int]:
        return [value % 2**64 for value in random.bits(seed, torch.arange(3)).tolist()]

    assert sequence(0) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert sequence(1234567) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_differ_in_each_part_and_never_change() -> None:
    assert len({random.key(seed, step, name) for seed in (1, 11) for step in (1, 11) for name in "ab"}) == 8
    assert random.key(1, 2, "a") == random.key(1, 2, "a")
    assert -(2**63) <= KEY < 2**63


def test_a_tensor_of_keys_is_each_key() -> None:
    keys = torch.tensor([KEY, 5, -9])
    together = random.bits(keys[:, None], torch.arange(4))
    assert torch.equal(together, torch.stack([random.bits(int(one), torch.arange(4)) for one in keys]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_is_strictly_inside(dtype: torch.dtype) -> None:
    drawn = random.uniform(KEY, torch.arange(200_000), dtype)
    assert drawn.dtype == dtype
    assert float(drawn.min()) > 0 and float(drawn.max()) < 1
    assert abs(float(drawn.double().mean()) - 0.5) < 0.005
    assert abs(float(drawn.double().var()) - 1 / 12) < 0.001


def test_normal_has_the_moments_and_tails_of_one() -> None:
    drawn = random.normal(KEY, torch.arange(1_000_000)).double()
    assert abs(float(drawn.mean())) < 0.004
    assert abs(float(drawn.var()) - 1) < 0.006
    assert abs(float((drawn**3).mean())) < 0.02
    assert abs(float((drawn**4).mean()) - 3) < 0.05
    for bound in (1.0, 2.0, 3.0):
        beyond = math.erfc(bound / math.sqrt(2))
        assert float((drawn.abs() > bound).double().mean()) == pytest.approx(beyond, rel=0.06)


def test_neighbours_are_not_correlated() -> None:
    index = torch.arange(200_000)
    drawn = random.normal(KEY, index).double()
    other_keys = [random.normal(KEY + 1, index), random.normal(random.key(7, 1, "model.norm.weight"), index)]
    neighbours = [drawn.roll(distance) for distance in (1, 2, 64, 4096)] + [
        one.double() for one in other_keys
    ]
    for neighbour in neighbours:
        assert abs(float((drawn * neighbour).mean())) < 0.012  # five standard deviations
        assert abs(float((drawn**2 * neighbour**2).mean()) - 1) < 0.04


def test_own_logarithm_and_cosine() -> None:
    drawn = random.uniform(KEY, torch.arange(100_000))
    edges = torch.tensor([2.0**-33, 0.5, math.sqrt(0.5), 1 - 2.0**-33], dtype=torch.float64)
    drawn = torch.cat([drawn, edges])
    assert float((random.logarithm(drawn) / drawn.log() - 1).abs().max()) < 1e-13
    assert float((random.cosine_of_turns(drawn) - (drawn * 2 * math.pi).cos()).abs().max()) < 1e-13


def test_slices_are_bit_equal_to_the_whole() -> None:
    shape = (37, 4, 53)
    whole = torch.empty(shape)
    random.fill_normal_(whole, KEY, 0.02, shape, (0, 0, 0))
    for offset, size in [((0, 0, 0), (5, 4, 53)), ((36, 3, 52), (1, 1, 1)), ((3, 1, 7), (20, 2, 31))]:
        piece = torch.empty(size)
        random.fill_normal_(piece, KEY, 0.02, shape, offset)
        box = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        assert torch.equal(piece, whole[box])
    random.fill_normal_(torch.empty(0, 4, 53), KEY, 0.02, shape, (37, 0, 0))


def test_chunks_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, row = torch.empty(7, 100), torch.empty(100)
    random.fill_normal_(whole, KEY, 1.0, (7, 100), (0, 0))
    assert torch.equal(whole.flatten(), random.normal(KEY, torch.arange(700)))
    random.fill_normal_(row, KEY, 1.0, (100,), (0,))
    assert torch.equal(row, whole[0])
    for chunk in (1, 30, 250):
        monkeypatch.setattr(random, "CHUNK_CPU", chunk)
        again = torch.empty(7, 100)
        random.fill_normal_(again, KEY, 1.0, (7, 100), (0, 0))
        assert torch.equal(again, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_hold_the_same_numbers(dtype: torch.dtype) -> None:
    plain, other = torch.empty(64), torch.empty(64, dtype=dtype)
    random.fill_normal_(plain, KEY, 0.02, (64,), (0,))
    random.fill_normal_(other, KEY, 0.02, (64,), (0,))
    assert torch.equal(plain.to(dtype), other)
