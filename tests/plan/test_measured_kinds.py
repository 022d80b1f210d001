"""Error bars from the nearest measured rows: the table is what the rows say, and distance widens a bar."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.kinds import counted

from shoal.facts.cluster.notation import find
from shoal.facts.cluster.stack import FOUNDRY
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.plan import evidence
from shoal.plan.measured_kinds import KINDS, expected_error
from shoal.predict.workload import Workload


def test_the_table_is_what_the_rows_say() -> None:
    """If not: ``python -m tests.plan.kinds``."""
    found = {kind[:5]: kind for kind in KINDS if kind.source != "shoal"}
    assert found.keys() == {kind[:5] for kind in counted()}
    for kind in counted():
        assert found[kind[:5]].rows == kind.rows
        assert found[kind[:5]].error == pytest.approx(kind.error, abs=0.002)
        assert found[kind[:5]][7:] == pytest.approx(kind[7:], rel=0.01)


def asked(layout: str, on: str = "8xA100-80GB", model: str = "llama2-7b", **recipe: object) -> Workload:
    settings = {"seq": 2048, "batch": 64, "precision": "bf16", **recipe}
    return Workload(PRESETS[model], find(on), Recipe.model_validate(settings), Layout.parse(layout))


def bar(workload: Workload) -> float:
    return evidence.error_bar(workload, 10.0)


def test_what_was_measured_has_the_error_that_was_seen() -> None:
    same = replace(asked("fsdp=8", model="llama3.2-1b", seq=4096), stack=FOUNDRY)
    seen = next(kind for kind in KINDS if kind[:5] == ("llm-foundry", "A100-80GB", False, False, False))
    assert bar(same) == pytest.approx(1.25 * seen.error, abs=0.02)


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (asked("fsdp=8"), asked("fsdp=8", "8xMI300X")),
        (asked("fsdp=8", "8xH100"), asked("fsdp=8", "8xH100", precision="fp8")),
        (asked("fsdp=64", "64xH100"), asked("fsdp=4096", "4096xH100", batch=4096)),
        (asked("fsdp=8", seq=4096), asked("cp=8", seq=262144)),
        (asked("fsdp=8,micro=1", "8xH100"), asked("fsdp=8,micro=1,offload=optimizer", "8xH100")),
    ],
)
def test_further_away_means_wider(near: Workload, far: Workload) -> None:
    assert bar(near) < bar(far) <= evidence.WIDEST


def test_several_unknowns_add_up_as_independent_errors_do() -> None:
    """Not one by one: the second widens a bar less than the first did."""
    one = asked("fsdp=8", "8xH100")
    bars = [expected_error(one, unmeasured, known=True) for unmeasured in (2, 3, 4)]
    assert bars[0] < bars[1] < bars[2]
    assert bars[2] - bars[1] < bars[1] - bars[0]
