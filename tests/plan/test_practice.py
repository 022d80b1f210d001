"""Where predictions cannot tell layouts apart, what published runs do decides."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.plan.accuracy import judged, ratios
from shoal.plan.complexity import parts
from shoal.plan.judge import WIDEST
from shoal.plan.practice import (
    ACROSS_NODES,
    EXPERTS_GATHERED,
    MANY_SHARDS,
    MOST_SHARDS,
    NAMES,
    RARE_SCHEDULE,
    STAGES_FIRST,
    departures,
)
from shoal.plan.published_runs import read
from shoal.predict.workload import Workload

ROWS = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


def asked(layout: str, model: str = "gpt3-175b", on: str = "64xA100-80GB") -> Workload:
    return Workload(PRESETS[model], find(on), Recipe(seq=2048, batch=1024), Layout.parse(layout))


@pytest.mark.parametrize(
    ("layout", "model", "on", "expected"),
    [
        ("fsdp=2,tp=4,pp=8", "gpt3-175b", "64xA100-80GB", [STAGES_FIRST]),
        ("tp=8,pp=8", "gpt3-175b", "64xA100-80GB", []),
        ("dp=4,tp=16", "gpt3-175b", "64xA100-80GB", [ACROSS_NODES]),
        ("fsdp=16,tp=4", "gpt3-175b", "64xA100-80GB", []),  # no stages
        ("fsdp=8,pp=8", "gpt3-175b", "64xA100-80GB", []),  # no tensor ranks
        ("tp=2,pp=2", "gpt3-175b", "2x2xA100-80GB", []),  # a node holds no more
        ("fsdp=64", "mixtral-8x7b", "64xH100", [EXPERTS_GATHERED]),
        ("fsdp=64,ep=8", "mixtral-8x7b", "64xH100", []),
        ("fsdp=64,ep=2", "mixtral-8x7b", "64xH100", [EXPERTS_GATHERED]),
        ("fsdp=4,tp=2,ep=4", "mixtral-8x7b", "8xH100", []),
        ("tp=4,pp=2", "mixtral-8x7b", "8xH100", [STAGES_FIRST]),  # no data rank that could hold other experts
        ("fsdp=64", "llama3-8b", "64xH100", []),
        ("fsdp=8,pp=8,schedule=interleaved", "llama3-8b", "64xH100", []),
        ("fsdp=8,pp=8,schedule=zb", "llama3-8b", "64xH100", [RARE_SCHEDULE]),
        ("fsdp=512", "llama3-8b", "512xH100", []),
        ("fsdp=1024", "llama3-8b", "1024xH100", [MANY_SHARDS]),
        ("fsdp=1024,zero=1", "llama3-8b", "1024xH100", []),  # exchanged once a step
        ("dp=4,fsdp=256", "llama3-8b", "1024xH100", []),
    ],
)
def test_departures(layout: str, model: str, on: str, expected: list[str]) -> None:
    workload = asked(layout, model, on)
    assert departures(workload) == expected
    assert [part for part in parts(workload) if part in NAMES] == expected


def test_what_is_given_up_is_what_comparisons_are_off_by() -> None:
    runs = read(ROWS)
    assert fmean(ratios(runs, judged(runs))) == pytest.approx(WIDEST, abs=0.005)


def test_the_most_ranks_that_share_weights_are_those_of_a_published_run() -> None:
    layouts = [workload.layout for run in read(ROWS) for workload in run.workloads]
    assert max(layout.shards for layout in layouts if layout.zero > 1) == MOST_SHARDS
