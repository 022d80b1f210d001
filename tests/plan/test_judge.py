"""One layout judged: its numbers, its evidence, and the JSON that a user relies on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from shoal.facts.cluster import notation
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.facts.recipe import Recipe
from shoal.plan import evidence
from shoal.plan.judge import Plan, as_json, judge
from shoal.plan.published_runs import read
from shoal.predict.flops import flops_per_token
from shoal.predict.workload import Workload

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


def judged(layout: str, model: str = "llama3-8b", on: str = "8xH100", lora: Lora | None = None) -> Plan:
    asked = Recipe(seq=4096, batch=64, precision="bf16")
    return judge(Workload(presets.find(model), notation.find(on), asked, Layout.parse(layout), lora=lora))


def test_the_fields_of_the_contract() -> None:
    plan = judged("fsdp=8,micro=1,recompute=full")
    document = json.loads(json.dumps(as_json(plan)))
    promised = (
        "layout degrees world fits memory step tokens_per_s_per_gpu model_tflops_per_gpu mfu vs_ddp traffic error_bar "
        "support command why"
    )
    assert set(promised.split()) <= set(document)
    assert document["layout"] == "fsdp=8,micro=1,recompute=full"
    assert document["degrees"] == {"dp": 1, "fsdp": 8, "tp": 1, "cp": 1, "pp": 1, "ep": 1}
    parts = dict(document["step"])
    assert sum(parts.values()) == pytest.approx(2 * parts["seconds"])
    assert set(parts) == {
        "seconds",
        "compute",
        "recompute",
        "exposed_comm",
        "bubble",
        "optimizer",
        "offload",
        "other",
    }
    assert {"op", "group", "count", "bytes"} == set(document["traffic"][0])
    ledger = "params grads optimizer activations logits buffers peak_allocated reserved device_total capacity"
    assert set(ledger.split()) | {"worst_stage"} <= set(document["memory"])


def test_rates_follow_from_the_step() -> None:
    plan = judged("fsdp=8,micro=1,recompute=full")
    rate = 4096 * 64 / plan.step.seconds / 8
    assert plan.tokens_per_s_per_gpu == pytest.approx(rate)
    tflops = flops_per_token(presets.find("llama3-8b"), 4096) * rate / 1e12
    assert plan.model_tflops_per_gpu == pytest.approx(tflops)
    assert plan.mfu == pytest.approx(tflops / 989.4, rel=0.01)
    # Frozen weights have no gradients to compute: about a third less.
    tuned = judged("dp=8,micro=1", lora=Lora())
    share = tuned.model_tflops_per_gpu / tuned.tokens_per_s_per_gpu / (tflops / rate)
    assert 0.6 < share < 0.8


def test_against_plain_replicas() -> None:
    sharded = judged("fsdp=8,micro=1,recompute=full")
    assert not sharded.ddp_fits  # 8B parameters at 16 bytes are 128 GB
    assert sharded.replicas.micro == 1 and sharded.vs_ddp > 0
    small = judged("dp=8,micro=8", model="tiny")
    assert small.ddp_fits and small.vs_ddp == pytest.approx(1.0, rel=0.3)
    # A batch smaller than the cluster: throughput is compared at the next batch that replicas can share out.
    assert judged("dp=64,tp=2", on="128xH100").vs_ddp > 0


def test_what_the_engine_runs_is_said() -> None:
    assert judged("fsdp=8").support == "runs" and judged("fsdp=8").runs
    assert "--save plan.toml && shoal train plan.toml" in judged("fsdp=8").command
    assert judged("fsdp=8,offload=params").support == "runs"
    assert judged("fsdp=8,offload=optimizer+params@nvme").support == "runs"
    planned = judged("fsdp=8,offload=activations")
    assert planned.support == "planned only: layout: offload=activations with recompute=none"
    assert "--export" in planned.command and not planned.runs
    assert judged("fsdp=8,ep=4", model="mixtral-8x7b").support == "runs"
    assert judged("dp=8", lora=Lora()).support == "runs"
    assert judged("dp=8,offload=optimizer", lora=Lora()).support == "runs"
    assert judged("dp=8,offload=params@nvme", lora=Lora()).support == "runs"


def test_error_bars_widen_with_what_was_never_measured() -> None:
    usual = judged("dp=8,micro=1,recompute=full")
    assert usual.unmeasured == [] and 0.05 < usual.error_bar < 0.12
    assert judged("fsdp=4,cp=2,recompute=full").unmeasured == ["cp_kind=ring"]
    assert judged("fsdp=4,cp=2,recompute=full").error_bar > usual.error_bar
    unknown = judged("dp=8,micro=1,recompute=full", on="8xB200")
    assert unknown.unmeasured == ["device B200"] and unknown.error_bar > usual.error_bar
    assert judged("dp=8,micro=1,recompute=full", on="8xH200").unmeasured == []


def test_evidence_is_what_the_published_rows_say() -> None:
    assert all(rows > 0 for rows in evidence.ROWS.values())
    runs = read(PUBLISHED)
    counted = Counter(claim for run in runs for claim in evidence.claims(run.workloads[0]))
    assert dict(counted) == evidence.ROWS
    assert max(run.workloads[0].layout.world for run in runs) == evidence.LARGEST
    assert max(run.workloads[0].recipe.seq for run in runs) == evidence.LONGEST
    assert min(run.seconds for run in runs if run.seconds) == evidence.SHORTEST


def test_a_step_shorter_than_any_published_is_known_as_well_in_milliseconds_and_no_better() -> None:
    workload = judged("dp=8", model="tiny").workload
    usual = evidence.error_bar(workload, 1.0)
    assert evidence.error_bar(workload, evidence.SHORTEST) == usual
    assert evidence.error_bar(workload, evidence.SHORTEST / 2) == pytest.approx(2 * usual)
    assert evidence.error_bar(workload, evidence.SHORTEST / 100) == evidence.WIDEST
    short = judged("dp=8", model="tiny")
    assert short.step.seconds < evidence.SHORTEST and short.unmeasured == ["steps under 0.058 s"]
