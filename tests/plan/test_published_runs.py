"""Published runs as questions: what each cell means, and what a blank one leaves open."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shoal.facts.cluster import stack
from shoal.facts.problem import BadInput
from shoal.plan.published_runs import fitted, read

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


def row(**changes: str) -> dict[str, str]:
    with TABLE.open(newline="") as file:
        first = next(csv.DictReader(file))
    return {**first, **changes}


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_every_row_of_the_collection_is_read() -> None:
    runs = read(TABLE)
    assert len(runs) == 908
    assert all(run.workloads for run in runs)
    assert len({run.id for run in runs}) == 908


def test_replicas_and_shards(tmp_path: Path) -> None:
    replicas, shards = read(
        table(
            tmp_path / "runs.csv",
            row(zero="0", dp="64", tp="1", pp="1"),
            row(source="torchtitan: x", zero="3", dp="64", tp="1", pp="1", compile="0"),
        )
    )
    assert str(replicas.workloads[0].layout).startswith("dp=64,")
    assert str(shards.workloads[0].layout).startswith("fsdp=64,")
    assert replicas.workloads[0].stack is stack.MEGATRON and shards.workloads[0].stack is stack.TITAN


def test_a_preset_of_the_same_shape_knows_what_a_table_does_not_say() -> None:
    wide = [run for run in read(TABLE) if run.workloads[0].model.name == "qwen3-32b"]
    assert wide and all(run.workloads[0].model.head_dim == 128 for run in wide)


def test_blank_cells_leave_several_answers(tmp_path: Path) -> None:
    (open_row,) = read(
        table(tmp_path / "runs.csv", row(micro_batch="", virtual="", pp="2", dp="32", tp="1", gpus="64"))
    )
    layouts = {str(workload.layout) for workload in open_row.workloads}
    assert len(layouts) > 3 and any("interleaved" in layout for layout in layouts)
    (titan,) = read(table(tmp_path / "titan.csv", row(source="torchtitan: x", compile="", zero="3")))
    either = [stack.TITAN, stack.TITAN_FUSED_NORMS, stack.TITAN_COMPILED]
    assert [workload.stack for workload in titan.workloads] == either


def test_the_network_of_a_source_is_its_own() -> None:
    clusters = {run.source: run.workloads[0].cluster for run in read(TABLE)}
    assert clusters["vtrain-multi"].nics * clusters["vtrain-multi"].network.bandwidth == 100e9  # 800 Gb/s
    assert clusters["llm-foundry"].nics == clusters["llm-foundry"].devices_per_node


def test_a_run_out_of_memory_has_no_time(tmp_path: Path) -> None:
    (run,) = read(table(tmp_path / "runs.csv", row(step_s="", status="oom")))
    assert run.seconds is None and run.status == "oom"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"gpu": "Z9000"}, "Z9000"), ({"layers": "many"}, "many"), ({"precision": "fp3"}, "fp3")],
)
def test_bad_rows_are_named(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(table(tmp_path / "runs.csv", row(), row(**changes)))
    assert "line 3" in str(caught.value) and words in str(caught.value)


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,source\n1,here\n")
    with pytest.raises(BadInput, match="no column"):
        read(path)
    with pytest.raises(BadInput, match="cannot read"):
        read(tmp_path / "nowhere.csv")


def test_fitted_rows_are_a_fixed_fifth() -> None:
    runs = read(TABLE)
    assert fitted(runs) == fitted(list(reversed(runs)))
    assert (
        0.19
        < len(fitted(runs))
        / sum(run.source in ("vtrain-single", "vtrain-multi", "llm-foundry", "torchtitan") for run in runs)
        <= 0.2
    )
