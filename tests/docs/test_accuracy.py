"""The accuracy page is what the planner says of the published runs today, and the planner is not worse than it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from shoal.plan.accuracy import Row, judged
from shoal.plan.published import fitted, read

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "data" / "published_runs.csv"


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    where = importlib.util.spec_from_file_location("accuracy_page", ROOT / "benchmarks" / "accuracy.py")
    assert where is not None and where.loader is not None
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return judged(read(TABLE))


def test_the_page_is_what_the_code_says(writer: ModuleType) -> None:
    said = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert said == writer.page(), "python benchmarks/accuracy.py --write"


def test_at_most_a_fifth_of_a_source_is_fitted() -> None:
    runs = read(TABLE)
    chosen = fitted(runs)
    for source in {run.source for run in runs}:
        mine = [run for run in runs if run.source == source]
        assert sum(run.id in chosen for run in mine) <= len(mine) / 5 + 1


# What rows that were not fitted may be off by: mean error, and bias either way. vtrain-multi's bias is wider than was
# wanted: see the page.
@pytest.mark.parametrize(
    ("source", "mean", "bias"),
    [
        ("vtrain-single", 0.061, 0.03),
        ("vtrain-multi", 0.075, 0.06),
        ("llm-foundry", 0.08, 0.03),
        ("torchtitan", 0.10, 0.035),
    ],
)
def test_errors_of_rows_that_were_not_fitted(rows: list[Row], source: str, mean: float, bias: float) -> None:
    chosen = fitted(read(TABLE))
    errors = [
        row.error for row in rows if row.source == source and row.id not in chosen and row.error is not None
    ]
    assert sum(map(abs, errors)) / len(errors) <= mean
    assert abs(sum(errors)) / len(errors) <= bias


def test_every_published_run_is_judged_to_fit(rows: list[Row]) -> None:
    assert [row.id for row in rows if not row.fits] == []


def test_peak_memory_of_our_own_engine_on_an_h200(writer: ModuleType) -> None:
    from shoal.predict.memory import ledger

    for row, question in writer.own_rows():
        predicted = ledger(question).peak_allocated / 2**30
        assert predicted == pytest.approx(row["memory_peak_gib"], rel=0.025), row["layout"]
