"""What to run: the rule by brute force on small workloads, what experts would run, one answer for all commands."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tests.plan.planning import answered
from tests.plan.test_search import MIXED, NARROW, TINY, small
from tests.thinned import thinned

from shoal.facts.cluster import notation
from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.plan import evidence
from shoal.plan.complexity import count, parts, plain
from shoal.plan.resolve import resolve
from shoal.plan.search import searched
from shoal.plan.space import Space
from shoal.predict.memory import ledger
from shoal.predict.time.step import cost_model, step
from shoal.predict.workload import Workload


@dataclass(frozen=True)
class Tried:
    """A layout as brute force sees it: by its text, as a user counts, and by what its bar says of its evidence."""

    layout: Layout
    seconds: float
    keys: int
    unmeasured: int


def every(model: Model, workload: Workload, runnable: bool = True) -> list[Tried]:
    """All that the engine runs, whether it fits or not."""
    recipe, on = workload.recipe, cost_model(workload)
    found = []
    for candidate in Space(model, recipe, workload.cluster.devices, runnable).everything():
        asked = Workload(model, workload.cluster, recipe, candidate.layout())
        keys = len(str(plain(asked.layout, recipe.batch)).split(","))
        found.append(Tried(asked.layout, step(asked, on).seconds, keys, len(evidence.unmeasured(asked))))
    return sorted(found, key=lambda one: one.seconds)


def workloads() -> list[tuple[int, Model, str, float, int, int]]:
    """At random, with memory from plenty to almost nothing: context and communicators alone take 1 to 3 GiB."""
    chance = random.Random(18)
    found = []
    for number in range(8):
        devices = chance.choice((2, 3, 4, 4, 4))  # eight have twenty times as many layouts
        batch = devices * chance.choice((1, 2)) if chance.random() < 0.8 else chance.choice((1, 5))
        memory = chance.choice((8000, 2400, 1800, 1300, 1190))
        model = chance.choice((NARROW, TINY, NARROW.model_copy(update={"hidden": 512, "ffn": 2048})))
        name = chance.choice((f"{devices}xH100", f"{devices}xA100-80GB", f"{devices}x1xH100"))
        found.append((number, model, name, memory, chance.choice((32, 256)), batch))
    # With almost nothing, the ledger of nearly every layout is asked for: two devices have few of them.
    wide = NARROW.model_copy(update={"hidden": 512, "ffn": 2048})
    return [*found[:6], (8, wide, "2xH100", 1190, 256, 4), found[7], found[6]]


@pytest.mark.parametrize(("number", "model", "on", "mebibytes", "seq", "batch"), thinned(workloads(), 3))
def test_the_rule_by_brute_force(
    number: int, model: Model, on: str, mebibytes: float, seq: int, batch: int
) -> None:
    cluster, recipe = small(on, mebibytes), Recipe(seq=seq, batch=batch, precision="bf16")
    workload = Workload(model, cluster, recipe, Layout())
    chosen = searched(workload, runnable=True).chosen
    all_of_them = every(model, workload)
    fastest = next((one for one in all_of_them if fits(workload, one)), None)
    if fastest is None:
        assert chosen is None
        return
    assert chosen is not None and chosen.plan.runs and chosen.plan.fits
    assert chosen.fastest.step.seconds == fastest.seconds
    limit = chosen.rival.limit
    assert chosen.plan.step.seconds <= limit
    mine = chosen.plan
    keys, unmeasured = len(str(mine.layout).split(",")), len(evidence.unmeasured(mine.workload))
    for one in all_of_them:
        if one.seconds <= limit and one.keys < keys and one.unmeasured <= unmeasured:
            assert not fits(workload, one), (
                f"{one.layout} is simpler than {mine.layout}, as fast, and as well known"
            )


def fits(workload: Workload, one: Tried) -> bool:
    return ledger(Workload(workload.model, workload.cluster, workload.recipe, one.layout)).fits


@pytest.mark.parametrize(("model", "devices", "batch"), [(TINY, 8, 16), (MIXED, 4, 4), (NARROW, 6, 12)])
def test_parts_are_counted_while_a_layout_is_decided(model: Model, devices: int, batch: int) -> None:
    recipe = Recipe(seq=32, batch=batch)
    cluster = notation.find(f"{devices}xH100")
    candidates = list(Space(model, recipe, devices).everything())
    for candidate in random.Random(0).sample(candidates, 400):
        layout = candidate.layout()
        workload = Workload(model, cluster, recipe, layout)
        assert count(candidate, workload) == len(parts(workload)), layout
        same = plain(layout, batch)
        assert same.micro_batch(batch) == layout.micro and same.replace(micro=layout.micro) == layout


def test_parts_have_the_names_of_their_keys() -> None:
    cluster, recipe = notation.find("8xH100"), Recipe(seq=32, batch=64)

    def named(layout: str) -> list[str]:
        return parts(Workload(TINY, cluster, recipe, Layout.parse(layout)))

    assert named("dp=8") == named("dp=8,micro=8") == []
    assert named("dp=8,micro=4,recompute=full") == ["micro", "recompute"]
    assert named("fsdp=8") == ["fsdp"] and named("dp=2,fsdp=4,zero=1,unit=2") == [
        "dp",
        "fsdp",
        "zero",
        "unit",
    ]
    assert named("dp=2,tp=4,sp=0") == ["dp", "tp", "sp"]
    assert named("fsdp=4,pp=2,schedule=interleaved,chunks=4") == ["fsdp", "pp", "schedule", "chunks"]
    assert named("fsdp=8,offload=optimizer+params") == ["fsdp", "offload=optimizer", "offload=params"]


@pytest.mark.parametrize(
    ("model", "on", "seq", "batch", "degrees"),
    [
        ("gpt2", "8xH100", 1024, 512, {"dp": 8}),
        ("gpt2", "8xA100-80GB", 1024, 256, {"dp": 8}),
        ("tiny", "8xH100", 128, 16, {"dp": 8}),
        ("llama3.2-1b", "8xH100", 4096, 64, {"dp": 8}),
        # Plain replicas would have to accumulate; shards have room for all at once.
        ("llama3.2-1b", "8xH100", 4096, 128, {"fsdp": 8}),
        ("llama3-8b", "8xH100", 4096, 64, {"fsdp": 8}),
        ("llama2-13b", "8xA100-80GB", 4096, 64, {"fsdp": 8}),
        # As simple as fsdp=320,tp=2, and no published run has replicas of shards: but tensor ranks are for what data
        # ranks cannot do.
        ("llama3-8b", "640xH100", 8192, 1280, {"dp": 5, "fsdp": 128}),
    ],
)
def test_what_an_expert_would_run(model: str, on: str, seq: int, batch: int, degrees: dict[str, int]) -> None:
    chosen = answered(model, on, seq, batch).chosen
    assert chosen is not None
    layout = chosen.plan.layout
    assert {axis: degree for axis, degree in layout.degrees.items() if degree > 1} == degrees
    assert set(layout.written()) <= {*degrees, "micro", "recompute"}, "nothing that is not needed"


# Also where devices stay idle, where the batch divides over none of them, and where a sequence is long.
AGREED = [
    ("gpt2", "8xH100", 1024, 512, "bf16"),
    ("tiny", "8xH100", 128, 12, "fp32"),
    ("tiny", "4xcpu", 128, 16, "fp32"),
    ("tiny", "8xcpu", 128, 7, "fp32"),
    ("tiny", "local", 128, 16, "fp32"),
    ("llama3.2-1b", "2xH100", 1024, 4, "bf16"),
    ("llama3-8b", "8xH100", 4096, 64, "bf16"),
    ("llama3-8b", "8xH100", 131072, 8, "bf16"),
    ("llama2-13b", "8xA100-40GB", 2048, 64, "bf16"),
    ("llama3-70b", "64xH100", 8192, 256, "bf16"),
]


@pytest.mark.parametrize(("model", "on", "seq", "batch", "precision"), AGREED)
def test_plan_and_train_agree(model: str, on: str, seq: int, batch: int, precision: str) -> None:
    few = answered(model, on, seq, batch, top=2, precision=precision)
    recipe = {"seq": seq, "batch": batch, "precision": precision}
    config = Config.model_validate({"model": {"preset": model}, "cluster": {"on": on}, "recipe": recipe})
    document = few.as_json()
    assert document["chosen"]["layout"] == str(resolve(config).layout)
    assert document["chosen"]["runs"] and document["chosen"]["why"]
    assert len(few.plans) <= 2 and [plan.layout for plan in few.plans if plan is few.choice] == [
        few.choice.layout
    ]


@pytest.mark.long
def test_nothing_is_recommended_that_fragments_would_push_out() -> None:
    """The 90th percentile of what was measured is 7.1 % on top of what tensors hold."""
    found = [
        answered(model, on, seq, batch) for model, on, seq, batch, precision in AGREED if precision == "bf16"
    ]
    found.append(answered("llama3-70b", "8xH100"))
    found.append(answered("llama3-8b", "1xH100", 4096, 8))
    plans = [plan for one in found for plan in (*one.plans, *(remedy.plan for remedy in one.remedies))]
    assert len(plans) > 50
    for plan in plans:
        memory = plan.memory
        beside = memory.device_total - memory.reserved
        assert memory.reserved / 1.038 * 1.071 + beside <= memory.capacity + 16, plan.layout
        assert memory.peak_allocated * 1.071 + beside <= memory.capacity, plan.layout
        assert plan.fits and memory.device_total < memory.device_p90 <= memory.capacity


def test_a_layout_that_fits_at_the_median_alone_does_not_fit() -> None:
    cluster, recipe = notation.find("8xH100"), Recipe(seq=4096, batch=64, precision="bf16")
    workload = Workload(TINY, cluster, recipe, Layout(dp=8, micro=8))
    held = ledger(workload)
    for capacity, expected in (
        (held.device_p90, True),
        (held.device_p90 - 1, False),
        (held.device_total, False),
    ):
        device = cluster.device.model_copy(update={"memory_bytes": capacity})
        there = cluster.model_copy(update={"device": device})
        assert ledger(Workload(TINY, there, recipe, workload.layout)).fits is expected
