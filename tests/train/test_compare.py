"""Predicted and measured side by side: in the rows, in the manifest, in the progress; never from the first steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.conftest import Train

from shoal.facts.config.file import load
from shoal.launch.progress import Progress
from shoal.plan.resolve import Job, resolve
from shoal.predict.memory import ledgers
from shoal.predict.workload import Workload
from shoal.train.metrics.compare import NO_PLAN, ON_CPU, SHARED, Comparison
from shoal.train.run_directory import RunDirectory

PLAN = {"step": {"seconds": 2.0}, "rates": "built in (assumed)"}


def job(steps: int = 100) -> Job:
    return resolve(load(None, ["cluster.on=2xcpu", f"recipe.steps={steps}"], "pp=2").config)


def rows(*seconds: float, first: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": first + number, "step_s": one, "memory_peak": 1000} for number, one in enumerate(seconds)
    ]


def test_the_median_of_steps_three_to_six_is_compared_once() -> None:
    comparison = Comparison(job(), PLAN, on_gpu=False)
    seen = rows(90.0, 50.0, 4.0, 5.0, 4.0, 3.0, 9.0, first=41)
    found = [comparison.add(row) for row in seen]
    assert [one is not None for one in found] == [False] * 5 + [True, False]
    expected = {
        "steps": 4,
        "step_s": 4.0,
        "predicted_step_s": 2.0,
        "step_s_error": -0.5,
        "rates": "built in (assumed)",
        "missing": {"memory_peak": ON_CPU},
        "told": False,
    }
    assert found[5] == {"after_step": 46, **expected}
    assert seen[5]["compared"] == expected
    assert all(row["predicted_step_s"] == 2.0 for row in seen)
    # A resident set is not what the ledger predicts.
    assert not any("predicted_memory_peak" in row for row in seen)


def test_on_a_gpu_the_first_ranks_own_ledger_is_compared_too() -> None:
    wanted = job()
    workload = Workload(wanted.model, wanted.cluster, wanted.config.recipe, wanted.layout)
    comparison = Comparison(wanted, PLAN, on_gpu=True)
    last = [comparison.add(row) for row in rows(*[4.0] * 6)][-1]
    assert last is not None
    assert last["predicted_memory_peak"] == ledgers(workload)[0].peak_allocated
    assert last["memory_peak_error"] == pytest.approx(last["predicted_memory_peak"] / 1000 - 1)


def test_a_short_run_is_compared_at_its_end_and_a_very_short_one_not_at_all() -> None:
    comparison = Comparison(job(steps=4), PLAN, on_gpu=False)
    found = [comparison.add(row) for row in rows(9.0, 9.0, 1.0, 3.0)]
    assert found[:3] == [None] * 3 and found[3] is not None
    assert found[3]["step_s"] == 2.0
    comparison = Comparison(job(steps=2), PLAN, on_gpu=False)
    assert [comparison.add(row) for row in rows(9.0, 9.0)] == [None, None]


def test_without_a_plan_it_says_so() -> None:
    comparison = Comparison(job(), {}, on_gpu=False)
    seen = rows(*[1.0] * 8)
    found = [comparison.add(row) for row in seen]
    assert [one is not None for one in found] == [False] * 5 + [True, False, False]
    assert seen[5].pop("compared")["missing"] == {"step_s": NO_PLAN, "memory_peak": ON_CPU}
    assert seen == rows(*[1.0] * 8)


def test_ranks_that_share_a_gpu_compare_memory_alone() -> None:
    wanted = job()
    crowded = replace(wanted, cluster=wanted.cluster.model_copy(update={"nodes": 1, "devices_per_node": 1}))
    comparison = Comparison(crowded, PLAN, on_gpu=True)
    last = [comparison.add(row) for row in rows(*[4.0] * 6)][-1]
    assert last is not None
    assert last["missing"] == {"step_s": SHARED}
    assert "step_s" not in last and last["memory_peak"] == 1000


def test_every_run_records_it(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    plan = json.loads(run.directory.plan.read_text())
    measured = json.loads(run.directory.manifest.read_text())["measured"]
    assert {row["predicted_step_s"] for row in run.rows} == {plan["step"]["seconds"]}
    assert [row["step"] for row in run.rows if "compared" in row] == [6]
    assert measured == {"after_step": 6, **run.rows[-1]["compared"]}
    assert measured["rates"] == plan["rates"] != ""
    assert "identity" in json.loads(run.directory.manifest.read_text())
    # The guess of a CPU that was never calibrated is kept, and not shown.
    assert not plan["calibrated"] and not measured["told"]
    assert "predicted" not in capsys.readouterr().err


def test_a_calibrated_cpu_is_told_in_one_short_line(tmp_path: Any) -> None:
    comparison = Comparison(job(), {**PLAN, "calibrated": "2025-01-01"}, on_gpu=False)
    seen = rows(*[4.0] * 6)
    for row in seen:
        comparison.add(row)
    run = RunDirectory(tmp_path)
    seen[-1] |= {"loss": 1.0, "tokens_per_s": 1.0, "mfu": None}
    run.metrics.write_text(json.dumps(seen[-1]) + "\n")
    console = Console(record=True, width=200)
    with Progress(console, run, 10):
        pass
    first = console.export_text().splitlines()[0]
    assert first.startswith("step      6/10  loss 1.0000")
    assert first.endswith("  predicted 2 s/step, measured 4 (-50.0%; rates: built in (assumed))")


def test_the_progress_shows_time_and_memory(tmp_path: Any) -> None:
    run = RunDirectory(tmp_path)
    found = {
        "predicted_step_s": 0.45,
        "step_s": 0.5,
        "step_s_error": -0.1,
        "rates": "measured here",
        "predicted_memory_peak": 2**31,
        "memory_peak": 2**31,
        "memory_peak_error": 0.0,
    }
    row = {"step": 6, "loss": 1.0, "step_s": 0.5, "tokens_per_s": 1.0, "mfu": None, "memory_peak": 2**31}
    run.metrics.write_text(json.dumps({**row, "compared": found}) + "\n")
    console = Console(record=True, width=200)
    with Progress(console, run, 10):
        pass
    assert (
        "predicted 0.45 s/step, measured 0.5 (-10.0%; rates: measured here); "
        "predicted 2.00 GiB, measured 2.00 (+0.0%)"
    ) in console.export_text()
