"""Software that the constants were not fitted on row by row: a modern Megatron, NeMo in fp8, Llama 3 as published."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.facts.cluster import stack
from shoal.plan.accuracy import AccuracyRow, judged, sources
from shoal.plan.published_runs import PublishedRun, read

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "other_stacks.csv"
RUNS = read(TABLE)


@pytest.fixture(scope="module")
def rows() -> dict[str, AccuracyRow]:
    return {row.id: row for row in judged(RUNS)}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_each_is_judged_as_a_modern_megatron(run: PublishedRun) -> None:
    assert {workload.stack for workload in run.workloads} == {stack.MEGATRON_CORE}
    assert all(workload.recipe.reduce == "fp32" for workload in run.workloads)


def test_mean_errors(rows: dict[str, AccuracyRow]) -> None:
    found = sources(rows.values())
    assert found.keys() == {"megatron-core", "llama3", "nemo"}
    timed = [row.error for row in rows.values() if row.error is not None]
    assert len(timed) == 17 and sum(map(abs, timed)) / len(timed) <= 0.15
    assert (found["megatron-core"].mean_abs_error or 1) <= 0.11


@pytest.mark.parametrize("name", [run.id for run in RUNS if run.id.startswith("llama3-405b")])
def test_llama_3_405b_as_published(rows: dict[str, AccuracyRow], name: str) -> None:
    """430, 400 and 380 TFLOP/s a GPU: tp8 pp16 with dp64, with dp128, and with cp16 dp8 at 131,072 tokens."""
    row = rows[name]
    assert row.error is not None and abs(row.error) <= 0.10
    assert "tp=8" in row.layout and "pp=16" in row.layout
