"""Gradients that leave the device are summed over the data ranks every micro-batch."""

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
    ("layout", "op", "group", "micro_batches"),
    [
        ("dp=4", "all_reduce", "dp", 3),
        ("fsdp=4,zero=1", "reduce_scatter", "fsdp", 3),
        ("dp=2,fsdp=2", "all_reduce", "dp", 3),
        ("dp=2,fsdp=2,zero=2", "all_reduce", "dp", 3),
        ("fsdp=4,zero=2", "reduce_scatter", "fsdp", 1),  # every micro-batch in any case
        ("fsdp=4", "reduce_scatter", "fsdp", 1),
        ("dp=2,pp=2", "all_reduce", "dp", 1),  # in a pipeline once a step
    ],
)
def test_sums_of_what_leaves(layout: str, op: str, group: str, micro_batches: int) -> None:
    here, away = (sums(f"{layout},micro=1{more}") for more in ("", ",offload=optimizer"))
    assert here.keys() == away.keys()
    assert away[op, group] == tuple(micro_batches * value for value in here[op, group])
    assert all(away[other] == here[other] for other in here if other != (op, group))
