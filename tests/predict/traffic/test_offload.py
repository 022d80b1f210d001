"""Gradients leave the device as they are summed anyway: offload sends nothing more between ranks."""

from __future__ import annotations

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.traffic import calls
from shoal.predict.workload import Workload

BATCH = 12


def sums(layout: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes of gradients, by operation and group."""
    recipe = Recipe(seq=64, batch=BATCH, precision="bf16")
    asked = Workload(PRESETS["tiny"], find("4xH100"), recipe, Layout.parse(layout))
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for call in calls(asked):
        if call.phase == "gradients":
            count, size = found.get((call.op, call.group), (0, 0))
            found[call.op, call.group] = count + call.count, size + call.count * call.bytes
    return found


@pytest.mark.parametrize(
    "layout", ["dp=4", "fsdp=4,zero=1", "fsdp=4,zero=2", "fsdp=4", "dp=2,fsdp=2", "dp=2,pp=2"]
)
def test_sums_of_what_leaves(layout: str) -> None:
    here, away = (sums(f"{layout},micro=1{more}") for more in ("", ",offload=optimizer"))
    assert here == away
