from __future__ import annotations

import pytest
import torch

from shoal.models.attention import attend, visible

POSITIONS = torch.tensor([[0, 1, 2, 0, 1]])
DOCUMENTS = torch.tensor([[4, 4, 4, 9, 9]])


def test_visible_is_the_past_of_ones_own_document_within_the_window() -> None:
    seen = visible(POSITIONS, DOCUMENTS, None)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    seen = visible(POSITIONS, DOCUMENTS, 2)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_attend_is_softmax_over_what_is_visible(window: int | None, packed: bool) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 10, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 10, 8, dtype=torch.float64)
    positions = torch.arange(10).expand(2, 10)
    documents = (positions // 4) if packed else None

    mixed = attend(query, key, value, positions, documents, scale=0.3, window=window)

    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores.masked_fill(~visible(positions, documents, window), -torch.inf)
    assert torch.allclose(mixed, scores.softmax(-1) @ value.repeat_interleave(2, 1), rtol=1e-12, atol=1e-14)
