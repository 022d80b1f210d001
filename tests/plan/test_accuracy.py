"""Judging a table of published runs: every row, errors over those with a time, and memory of the kind reported."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from shoal.facts.problem import BadInput
from shoal.plan.accuracy import as_json, judged, ratios, sources, worst
from shoal.plan.published_runs import read
from shoal.predict.memory import ledger
from shoal.predict.time.step import step

ROW = {
    "id": "one",
    "source": "vtrain-single: somewhere",
    "arch": "gpt",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "kv_heads": "16",
    "ffn": "8192",
    "vocab": "51200",
    "seq": "2048",
    "gpu": "A100-80GB",
    "gpus": "8",
    "gpus_per_node": "8",
    "dp": "8",
    "zero": "0",
    "tp": "1",
    "sp": "0",
    "pp": "1",
    "virtual": "1",
    "cp": "1",
    "micro_batch": "2",
    "global_batch": "64",
    "recompute": "full",
    "precision": "fp16",
    "compile": "0",
    "step_s": "2.0",
    "mem_gib": "",
    "mem_kind": "",
    "status": "ok",
}


def table(path: Path, *changes: dict[str, str]) -> Path:
    file = path / "runs.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, ROW.keys())
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return file


def test_every_row_is_there_and_errors_are_over_rows_with_a_time(tmp_path: Path) -> None:
    huge = {"layers": "96", "hidden": "12288", "heads": "96", "kv_heads": "96", "ffn": "49152"}
    path = table(
        tmp_path,
        {},
        {"id": "oom", "step_s": "", "status": "oom", **huge},
        {"id": "does not fit", **huge},
        {"id": "elsewhere", "source": "new: untimed", "step_s": ""},
    )
    rows = judged(read(path))
    assert [row.id for row in rows] == ["one", "oom", "does not fit", "elsewhere"]
    one, oom, large, _ = rows
    assert one.fits and one.error == pytest.approx(one.predicted_step_s / 2.0 - 1)
    assert not oom.fits and oom.error is None and oom.measured_step_s is None and oom.status == "oom"
    assert not large.fits and large.error is not None and large.predicted_step_s > 0

    found = sources(rows)
    assert list(found) == ["vtrain-single", "new"]
    timed = [row.error for row in rows if row.error is not None]
    single = found["vtrain-single"]
    assert (single.n, single.rows, single.fit) == (2, 3, 1)
    assert single.mean_abs_error == pytest.approx(sum(map(abs, timed)) / 2)
    assert single.max_abs_error == max(map(abs, timed))
    assert single.bias == pytest.approx(sum(timed) / 2)
    assert found["new"].n == 0 and found["new"].mean_abs_error is None
    assert worst(rows, 1)[0].id == max((one, large), key=lambda row: abs(row.error or 0)).id


def test_memory_is_of_the_kind_that_the_row_reports(tmp_path: Path) -> None:
    path = table(tmp_path, {"mem_kind": "allocated"}, {"mem_kind": "reserved"}, {"mem_kind": ""})
    runs = read(path)
    need = ledger(runs[0].workloads[0])
    allocated, reserved, unsaid = (row.predicted_mem_gib * 2**30 for row in judged(runs))
    assert allocated == pytest.approx(need.peak_allocated)
    assert reserved == unsaid == pytest.approx(need.reserved)


def test_what_is_blank_the_planner_chooses(tmp_path: Path) -> None:
    (run,) = read(table(tmp_path, {"micro_batch": ""}))
    assert len(run.workloads) > 1
    fastest = min(step(workload).seconds for workload in run.workloads if ledger(workload).fits)
    assert judged([run])[0].predicted_step_s == pytest.approx(fastest)


def test_the_document_has_the_fields_that_are_promised(tmp_path: Path) -> None:
    document = as_json(judged(read(table(tmp_path, {}))))
    promised = {
        "id",
        "predicted_step_s",
        "measured_step_s",
        "error",
        "fits",
        "predicted_mem_gib",
        "status",
    }
    assert promised <= document["rows"][0].keys()
    assert {"n", "mean_abs_error", "max_abs_error", "bias"} <= document["sources"]["vtrain-single"].keys()


def test_all_that_is_wrong_with_a_table_is_said_at_once(tmp_path: Path) -> None:
    path = table(tmp_path, {"layers": "many"}, {"gpu": "abacus"})
    with pytest.raises(BadInput) as caught:
        read(path)
    assert len(caught.value.problems) == 2


def test_layouts_are_compared_that_ran_the_same_on_as_many_devices(tmp_path: Path) -> None:
    split = {"id": "two", "dp": "4", "tp": "2", "step_s": "3.0"}
    others = {"id": "three", "gpus": "4", "dp": "4"}, {"id": "four", "global_batch": "128"}
    runs = read(table(tmp_path, {}, split, *others))
    rows = judged(runs)
    (off,) = ratios(runs, rows)
    predicted = rows[0].predicted_step_s / rows[1].predicted_step_s
    assert off == pytest.approx(abs(math.log(predicted / (2.0 / 3.0))))
