"""What a dry run leaves out because it repeats what was seen: nothing of what it finds depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.predict.counted import ask

from shoal.facts.optimizers import ROUNDED_ELEMENTS
from shoal.prove import fake_world
from shoal.prove.dryrun import dryrun
from shoal.prove.fake_world import without_data


@pytest.mark.parametrize(
    "states", [{}, {"rounding": "nearest"}, {"optimizer": "sgd"}, {"states": "int8"}], ids=str
)
def test_an_update_in_many_parts_takes_what_its_first_and_last_take(
    states: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short rows: what is computed on the way of an update is the most that is held.
    changes = {"vocab": 10 * ROUNDED_ELEMENTS // 256 + 7, "layers": 1, "tied": True}
    workload = ask(
        "micro=1", changes, **{"precision": "bf16", "states": "bf16", "seq": 4, "batch": 1, **states}
    )
    short = dryrun(workload, 0)
    monkeypatch.setattr(fake_world, "_first_and_last", lambda parts: parts)
    whole = dryrun(workload, 0)
    assert short.differences(0) == whole.differences(0) == []
    assert short.memory == whole.memory and short.places == whole.places


def test_what_is_filled_is_remembered_by_its_shape() -> None:
    with without_data():
        for _ in range(2):
            for size in (4, 5):
                given, filled, small = torch.ones(size), torch.empty(size), torch.empty(0)
                assert torch.div(given, 2.0, out=filled) is filled
                torch.div(given, 2.0, out=small)
                assert small.shape == given.shape
