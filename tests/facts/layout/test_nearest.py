"""The layouts that are named are legal, near and few, and found in no time."""

from __future__ import annotations

import time
from itertools import product
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.facts import support
from shoal.facts.cluster import Cluster, assemble, notation
from shoal.facts.layout import SCHEDULES, Layout, Offload
from shoal.facts.layout.legality import violations
from shoal.facts.layout.nearest import nearest_layouts, problems
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe

TINY, GPT2, MIXTRAL = PRESETS["tiny"], PRESETS["gpt2"], PRESETS["mixtral-8x7b"]
LARGE = PRESETS["llama3-405b"]
H100 = notation.find("8xH100")
LOCAL = assemble("local", H100.device, nodes=1, devices_per_node=6)


def distance(old: Layout, new: Layout) -> float:
    """Doubling or halving a degree costs 1."""
    return round(sum(abs(log2(new.degrees[axis] / before)) for axis, before in old.degrees.items()), 9)


def near(layout: str, model: Model = TINY, seq: int = 256, batch: int = 16, **given: Any) -> str:
    found = nearest_layouts(Layout.parse(layout), model, Recipe(seq=seq, batch=batch), **given)
    return "; ".join(map(str, found))


# layout, the nearest legal ones, and whatever differs from tiny with seq 256 and batch 16 on any world
NEAREST: list[tuple[str, str, dict[str, Any]]] = [
    ("dp=3", "dp=4; dp=2; dp=8", {}),
    ("tp=3", "tp=4; tp=2; tp=8", {}),
    ("tp=4", "tp=4,sp=0; tp=2; dp=2,tp=4,sp=0", {"seq": 250}),  # 250 tokens divide by 2 and not by 4
    ("pp=16", "pp=8; pp=7; pp=6", {}),
    ("pp=8,schedule=zbv", "pp=8; pp=7; pp=6", {}),
    (
        "pp=4,schedule=interleaved,chunks=5",
        "pp=4,schedule=interleaved; pp=5; pp=3,schedule=interleaved",
        {},
    ),
    ("dp=2,micro=3", "dp=2,micro=2; fsdp=2,micro=2; tp=2,micro=2", {"cluster": notation.find("2xH100")}),
    # The world that the cluster has.
    ("dp=4", "dp=8; dp=4,fsdp=2; dp=4,tp=2", {"cluster": H100}),
    ("dp=3,tp=3", "dp=4,tp=2; dp=2,tp=4; dp=2,fsdp=2,tp=2", {"cluster": H100}),
    ("tp=4,pp=4", "tp=4,pp=2; tp=2,pp=4; dp=2,tp=4", {"cluster": H100}),
    ("dp=8", "dp=4,tp=2; dp=4,cp=2; dp=4,pp=2", {"cluster": H100, "batch": 12, "wanted": support.runs}),
    ("dp=8", "dp=4; dp=2; dp=1", {"cluster": LOCAL}),  # on this machine some may stay idle
    (
        "fsdp=64,tp=7,pp=10,schedule=interleaved,chunks=20",
        "fsdp=64,tp=8,pp=8,schedule=interleaved,chunks=15; fsdp=64,tp=4,pp=16,schedule=interleaved,chunks=7; "
        "fsdp=32,tp=8,pp=16,schedule=interleaved,chunks=7",
        {"cluster": notation.find("4096xH100"), "model": LARGE, "batch": 2048, "seq": 8192},
    ),
    # Strict, and only what the engine runs.
    ("dp=2,tp=2", "dp=2,micro=1; dp=4,micro=1; dp=2,fsdp=2,micro=1", {"strict": True, "micro": 1}),
    (
        "dp=3,cp=2,offload=params",
        "dp=4,cp=2,offload=params; dp=2,cp=2,offload=params; dp=8,cp=2,offload=params",
        {"wanted": support.runs},
    ),
    ("dp=8,ep=3", "dp=8,ep=4; dp=8,ep=2; dp=8,ep=8", {"model": MIXTRAL}),
    # A recipe that no layout takes, and a cluster that this batch and model cannot fill.
    ("cp=3", "", {"model": GPT2, "seq": 2000}),
    ("dp=8", "", {"batch": 7, "strict": True, "cluster": notation.find("11x1xH100")}),
]


@pytest.mark.parametrize(("layout", "named", "given"), NEAREST)
def test_nearest(layout: str, named: str, given: dict[str, Any]) -> None:
    given = dict(given)
    micro = f",micro={given.pop('micro')}" if "micro" in given else ""
    assert near(layout + micro, **given) == named


DEGREE = st.sampled_from([1, 1, 2, 3, 4, 6, 8, 16])


@settings(max_examples=120)
@given(
    st.fixed_dictionaries(
        {"dp": DEGREE, "fsdp": DEGREE, "tp": DEGREE, "cp": DEGREE, "pp": DEGREE, "ep": DEGREE},
        optional={
            "micro": DEGREE,
            "chunks": DEGREE,
            "zero": st.sampled_from((1, 2, 3)),
            "schedule": st.sampled_from(SCHEDULES),
            "cp_kind": st.sampled_from(("ring", "ulysses")),
            "sp": st.booleans(),
            "offload": st.just((Offload(what="params"),)),
        },
    ),
    st.sampled_from([TINY, GPT2, MIXTRAL, PRESETS["deepseek-v3"], PRESETS["qwen2-7b"]]),
    st.integers(1, 200),
    st.sampled_from([1, 255, 256, 1000, 1500]),
    st.sampled_from([None, H100, LOCAL]),
    st.booleans(),
    st.sampled_from([support.runs, lambda layout: True]),
)
def test_what_is_named_parses_and_breaks_no_rule(
    fields: dict[str, Any],
    model: Model,
    batch: int,
    seq: int,
    cluster: Cluster | None,
    strict: bool,
    wanted: Any,
) -> None:
    layout, recipe = Layout(**fields), Recipe(seq=seq, batch=batch)
    broken = violations(layout, model, recipe, cluster, strict)
    said = problems(layout, model, recipe, cluster, strict, wanted)
    assert said[: len(broken)] == broken
    if len(said) == len(broken):
        return
    assert broken
    (last,) = said[len(broken) :]
    assert last.what == f"layout {layout} is not legal here"
    named = last.fix.removeprefix("nearest legal layouts: ").split("; ")
    assert 1 <= len(named) == len(set(named)) <= 3
    legal = [Layout.parse(text) for text in named]
    for text, other in zip(named, legal, strict=True):
        assert str(other) == text
        assert violations(other, model, recipe, cluster, strict) == []
        assert wanted(other)
    distances = [distance(layout, other) for other in legal]
    assert distances == sorted(distances)


@settings(max_examples=25)
@given(
    st.fixed_dictionaries({"dp": DEGREE, "fsdp": DEGREE, "tp": DEGREE, "pp": DEGREE}),
    st.sampled_from([4, 6, 12, 16]),
    st.sampled_from([H100, LOCAL]),
    st.booleans(),
)
def test_nothing_nearer_is_overlooked(
    fields: dict[str, int], batch: int, cluster: Cluster, strict: bool
) -> None:
    layout, recipe = Layout(**fields, micro=1), Recipe(seq=256, batch=batch)
    in_worlds = [
        Layout(dp=dp, fsdp=fsdp, tp=tp, cp=cp, pp=pp, micro=1)
        for dp, fsdp, tp, cp, pp in product(range(1, cluster.devices + 1), repeat=5)
        if dp * fsdp * tp * cp * pp <= cluster.devices
    ]
    legal = [other for other in in_worlds if not violations(other, TINY, recipe, cluster, strict)]
    distances = sorted(distance(layout, other) for other in legal)
    found = nearest_layouts(layout, TINY, recipe, cluster, strict, support.runs)
    assert [distance(layout, other) for other in found] == distances[:3]


@pytest.mark.parametrize(
    ("layout", "cluster", "model"),
    [
        ("dp=999999937,pp=999999937,tp=999999937", None, TINY),
        ("dp=3,tp=3,pp=3", "16384xH100", LARGE),
        ("dp=8,tp=8,schedule=zbv,pp=64", "100000xH100", LARGE),
        ("dp=3,ep=7", "2048xH100", PRESETS["deepseek-v3"]),
    ],
)
@pytest.mark.parametrize("batch", [10**9, 2**20 - 1, 999_999_937])
def test_at_any_size_it_is_quick(layout: str, cluster: str | None, model: Model, batch: int) -> None:
    recipe = Recipe(seq=8192, batch=batch)
    on = notation.find(cluster) if cluster else None
    started = time.process_time()
    nearest_layouts(Layout.parse(layout), model, recipe, on, False, support.runs)
    assert time.process_time() - started < 1  # tens of milliseconds, on a machine that has nothing else to do
