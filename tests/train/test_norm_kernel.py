"""The squares of many gradients in one launch: what each program is given, and on a GPU what comes of it."""

from __future__ import annotations

import pytest
import torch

from shoal.train.norm_kernel import CHUNK, summed_squares, table


def test_every_element_is_one_programs() -> None:
    sizes = [1, CHUNK, 0, CHUNK + 1, 3 * CHUNK]
    gradients = [torch.zeros(size) for size in sizes]
    rows, owners = table(gradients)
    assert [size for _, size, _ in rows] == [1, CHUNK, CHUNK + 1, 3 * CHUNK]
    assert [address for address, _, _ in rows] == [one.data_ptr() for one in gradients if one.numel()]
    taken = [0] * len(rows)
    for chunk, owner in enumerate(owners):
        start = (chunk - rows[owner][2]) * CHUNK
        assert start == taken[owner] < rows[owner][1]
        taken[owner] = min(start + CHUNK, rows[owner][1])
    assert taken == [size for _, size, _ in rows]


def test_a_cpu_has_torchs_norm() -> None:
    assert summed_squares([torch.ones(3)]) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_is_the_same() -> None:
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    gradients = [
        torch.randn(size, device="cuda", dtype=kind)
        for size, kind in zip((5, CHUNK + 3, 70_000), kinds, strict=True)
    ]
    found = summed_squares(gradients)
    assert found is not None and found.dtype == torch.float64
    assert float(found) == pytest.approx(
        sum(float(one.double().square().sum()) for one in gradients), rel=1e-5
    )
    gradients[1][7] = torch.nan
    assert torch.isnan(summed_squares(gradients) or torch.zeros(()))
