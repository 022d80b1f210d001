"""Every rule refuses what it must, passes what it may, and names a value that is really legal."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.facts.cluster import Cluster, assemble, notation
from shoal.facts.layout import SCHEDULES, Layout
from shoal.facts.layout.legality import check, nearest_divisor, nearest_multiple, violations
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe

TINY, GPT2, MIXTRAL = PRESETS["tiny"], PRESETS["gpt2"], PRESETS["mixtral-8x7b"]
DEEPSEEK = PRESETS["deepseek-v3"]
WIDE = PRESETS["gpt2-xl"].model_copy(
    update={"name": "wide", "ffn": 6405}
)  # 25 heads, and 25 does not divide 6405
SHARED = DEEPSEEK.model_copy(
    update={"experts": DEEPSEEK.experts and DEEPSEEK.experts.model_copy(update={"shared_ffn": 2112})}
)
RECIPE = Recipe(seq=256, batch=16)
H100 = notation.find("8xH100")
LOCAL = assemble("local", H100.device, nodes=1, devices_per_node=6)


def judge(layout: str, model: Model = TINY, **given: Any) -> list[Problem]:
    recipe = RECIPE.model_copy(update={key: given.pop(key) for key in ("seq", "batch") if key in given})
    return violations(Layout.parse(layout), model, recipe, **given)


def whats(problems: list[Problem]) -> str:
    return "\n".join(problem.what for problem in problems)


def apply(fix: str, layout: Layout, recipe: Recipe) -> tuple[Layout, Recipe]:
    """The layout and recipe after one machine-readable fix, such as ``recipe.batch = 16`` or ``dp=4``."""
    key, value = re.fullmatch(r"([a-z_.]+) ?= ?(\S+)", fix).groups()  # type: ignore[union-attr]
    if key.startswith("recipe."):
        return layout, recipe.model_copy(update={key.removeprefix("recipe."): int(value)})
    pairs = [pair for pair in str(layout).split(",") if not pair.startswith(f"{key}=")]
    return Layout.parse(",".join([*pairs, fix])), recipe


# layout, what is said, its fix, and whatever differs from tiny with seq 256 and batch 16
BROKEN: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "dp=1",
        "seq=2000 is longer than the 1024 learned positions",
        "recipe.seq = 1024",
        {"model": GPT2, "seq": 2000},
    ),
    ("cp=3", "is longer than", "recipe.seq = 1020", {"model": GPT2, "seq": 1026}),
    ("dp=3", "batch=16 does not divide by dp·fsdp = 3", "recipe.batch = 15 or dp=2", {}),
    ("dp=32", "batch=16 does not divide by dp·fsdp = 32", "recipe.batch = 32 or dp=16", {}),
    ("dp=2,fsdp=5", "batch=16 does not divide by dp·fsdp = 10", "recipe.batch = 20 or fsdp=4", {}),
    ("dp=3,fsdp=2", "batch=16 does not divide by dp·fsdp = 6", "recipe.batch = 18", {}),
    ("dp=2,micro=3", "dp·fsdp·micro = 2·3 = 6", "recipe.batch = 18 or micro=2", {}),
    ("dp=3,micro=2", "dp·fsdp·micro = 3·2 = 6", "recipe.batch = 18 or dp=2", {}),
    ("micro=17", "dp·fsdp·micro = 1·17 = 17", "recipe.batch = 17 or micro=16", {}),
    ("tp=3", "tp=3 does not divide the 8 attention heads", "tp=2", {"seq": 258}),
    ("tp=16", "tp=16 does not divide the 8 attention heads", "tp=8", {}),
    ("tp=5,sp=0", "tp=5 and the 8 key/value heads", "tp=4", {"model": PRESETS["llama3-8b"]}),
    (
        "tp=7",
        "tp=7 and the 4 key/value heads of qwen2-7b: neither divides the other",
        "tp=4",
        {"model": PRESETS["qwen2-7b"], "seq": 280},
    ),
    ("tp=25", "tp=25 does not divide the MLP width 6405 of wide", "tp=5", {"model": WIDE, "seq": 500}),
    ("tp=128", "tp=128 does not divide the shared experts' width 2112", "tp=64", {"model": SHARED}),
    (
        "tp=4",
        "sequence parallel: tp=4 does not divide the 250 tokens",
        "sp=0 or recipe.seq = 248",
        {"seq": 250},
    ),
    ("tp=2,cp=3", "tp=2 does not divide the 85 tokens", "sp=0 or recipe.seq = 252", {"seq": 255}),
    ("cp=3", "cp=3 (ring) needs seq=256 to divide by 6", "recipe.seq = 258 or cp=2", {}),
    ("cp=256", "cp=256 (ring) needs seq=256 to divide by 512", "recipe.seq = 512 or cp=128", {}),
    ("cp=3,cp_kind=ulysses", "cp=3 (ulysses) needs seq=256 to divide by 3", "recipe.seq = 255 or cp=2", {}),
    (
        "cp=16,cp_kind=ulysses",
        "cp_kind=ulysses: tp·cp = 16 does not divide the 8 heads",
        "cp=8 or cp_kind=ring",
        {},
    ),
    ("tp=4,cp=4,cp_kind=ulysses", "tp·cp = 16 does not divide the 8 heads", "cp=2 or cp_kind=ring", {}),
    (
        "cp=2,cp_kind=ulysses",
        "of cp=2 and 3 key/value heads a tensor rank, neither divides the other",
        "cp=1 or cp_kind=ring",
        {"model": TINY.model_copy(update={"heads": 12, "kv_heads": 3})},
    ),
    ("pp=2,chunks=2", "schedule=1f1b has 1 chunk(s) per rank, not 2", "chunks=1", {}),
    ("pp=2,schedule=gpipe,chunks=4", "schedule=gpipe has 1 chunk(s) per rank, not 4", "chunks=1", {}),
    ("pp=2,schedule=zbv,chunks=1", "schedule=zbv has 2 chunk(s) per rank, not 1", "chunks=2", {}),
    ("pp=2,schedule=dualpipev,chunks=3", "schedule=dualpipev has 2 chunk(s) per rank, not 3", "chunks=2", {}),
    (
        "pp=2,schedule=interleaved,chunks=1",
        "schedule=interleaved needs at least 2 chunks",
        "chunks=2 or schedule=1f1b",
        {},
    ),
    ("pp=8,schedule=interleaved,chunks=1", "needs at least 2 chunks", "schedule=1f1b", {}),
    ("pp=16", "pp·chunks = 16 stages, but tiny has 8 layers", "pp=8", {}),
    ("pp=8,schedule=zbv", "pp·chunks = 16 stages, but tiny has 8 layers", "pp=4", {}),
    ("pp=4,schedule=interleaved,chunks=3", "pp·chunks = 12 stages", "pp=2 or chunks=2", {}),
    ("pp=4,schedule=interleaved,chunks=9", "pp·chunks = 36 stages", "pp=1 or chunks=2", {}),
    ("dp=4,ep=2", "ep=2, but tiny has no experts", "ep=1", {}),
    (
        "dp=12,ep=3",
        "ep=3 does not divide the 8 experts of mixtral-8x7b",
        "ep=2",
        {"model": MIXTRAL, "batch": 12},
    ),
    ("dp=2,ep=8", "ep=8 must divide dp·fsdp·cp = 2", "ep=2", {"model": MIXTRAL}),
    # Ranks with the same experts would be {0, 4, 8}, {1, 5, 9}, …: neither within a copy of six nor across copies.
    (
        "dp=2,fsdp=6,ep=4",
        "ep=4 and the 6 ranks of fsdp·cp that share one copy: neither divides the other",
        "ep=2 or fsdp=4",
        {"model": MIXTRAL, "batch": 48},
    ),
    (
        "dp=4,cp=3,ep=4",
        "ep=4 and the 3 ranks of fsdp·cp that share one copy: neither divides the other",
        "ep=1 or fsdp=4",
        {"model": MIXTRAL, "seq": 384},
    ),
    ("tp=2", "run.strict: tp=2 sums in a different order", "tp=1", {"strict": True}),
    ("cp=2", "run.strict: cp=2 sums in a different order", "cp=1", {"strict": True}),
    ("dp=2,ep=2", "run.strict: ep=2 sums in a different order", "ep=1", {"strict": True, "model": MIXTRAL}),
    ("micro=2", "one sequence at a time; micro=2", "micro=1", {"strict": True}),
    (
        "dp=4",
        "layout dp=4 has 4 rank(s), cluster 8xH100 has 8 device(s)",
        "dp=8 or fsdp=2",
        {"cluster": H100},
    ),
    (
        "dp=8,tp=2",
        "has 16 rank(s), cluster 8xH100 has 8 device(s)",
        "dp=4",
        {"cluster": H100},
    ),
    ("dp=8", "cluster local has 6 device(s)", "dp=4", {"cluster": LOCAL}),
]


@pytest.mark.parametrize(("layout", "what", "fix", "given"), BROKEN)
def test_a_broken_rule_names_the_nearest_legal_value(
    layout: str, what: str, fix: str, given: dict[str, Any]
) -> None:
    matching = [problem for problem in judge(layout, **given) if what in problem.what]
    assert [problem.fix for problem in matching] == [fix]


@pytest.mark.parametrize(("layout", "what", "fix", "given"), BROKEN)
def test_the_named_value_puts_it_right_and_breaks_nothing_else(
    layout: str, what: str, fix: str, given: dict[str, Any]
) -> None:
    given = dict(given)
    model = given.pop("model", TINY)
    recipe = RECIPE.model_copy(update={key: given.pop(key) for key in ("seq", "batch") if key in given})
    written = Layout.parse(layout)
    before = len(violations(written, model, recipe, **given))
    for alternative in fix.split(" or "):
        fixed_layout, fixed_recipe = apply(alternative, written, recipe)
        after = violations(fixed_layout, model, fixed_recipe, **given)
        assert len(after) < before
        assert what not in whats(after)


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("dp=1", {}),
        ("dp=4,micro=2", {}),
        ("dp=2,fsdp=8", {}),
        ("dp=1", {"model": TINY, "seq": 100_000}),  # rotary positions have no end
        ("dp=1", {"model": GPT2, "seq": 1024}),
        ("tp=8", {}),  # each of the 4 key/value heads on two ranks
        ("tp=4", {}),
        ("tp=2", {"model": SHARED}),
        ("tp=4,sp=0", {"seq": 250}),
        ("cp=2", {}),
        ("cp=128", {}),
        ("tp=2,cp=4,cp_kind=ulysses", {}),
        ("cp=8,cp_kind=ulysses", {}),
        ("pp=8", {}),
        ("pp=2,schedule=zb,chunks=4", {}),
        ("pp=4,schedule=zbv", {}),
        ("pp=4,schedule=interleaved", {}),
        ("pp=4,schedule=interleaved,micro=1", {"batch": 3}),
        ("pp=4,schedule=interleaved,micro=1", {"batch": 6}),  # any number of micro-batches
        ("dp=4,ep=4", {"model": MIXTRAL}),
        ("cp=2,dp=4,ep=8", {"model": MIXTRAL}),
        ("dp=2,fsdp=6,ep=2", {"model": MIXTRAL, "batch": 12}),
        ("dp=4,fsdp=2,ep=8", {"model": MIXTRAL}),
        ("dp=2,fsdp=2,pp=2,micro=1", {"strict": True}),
        ("dp=8", {"cluster": H100}),
        ("tp=2,dp=2", {"cluster": LOCAL}),  # two devices stay idle
        ("dp=16", {"cluster": notation.find("2xcpu")}),  # any world on a cpu
        ("dp=16", {"cluster": notation.find("1xcpu")}),
    ],
)
def test_what_is_legal_passes(layout: str, given: dict[str, Any]) -> None:
    assert judge(layout, **given) == []


def test_everything_broken_is_reported_at_once() -> None:
    layout = Layout.parse("dp=3,tp=5,cp=3,pp=9,schedule=zbv,chunks=5,ep=2,micro=7")
    with pytest.raises(BadInput) as caught:
        check(layout, TINY, RECIPE.model_copy(update={"seq": 254}), H100, strict=True)
    said = whats(list(caught.value.problems))
    for part in (
        "batch=16",
        "attention heads",
        "key/value heads",
        "MLP width",
        "sequence parallel",
        "cp=3 (ring)",
        "schedule=zbv",
        "stages",
        "no experts",
        "ep=2 must divide",
        "run.strict: tp=5",
        "run.strict: cp=3",
        "run.strict: ep=2",
        "one sequence at a time",
        "8 device(s)",
    ):
        assert part in said
    assert len(caught.value.problems) == 15


def test_where_no_single_value_helps_the_fix_says_what_would() -> None:
    (world,) = judge("tp=4,pp=4", cluster=H100)
    assert world.fix == "degrees dp·fsdp·tp·cp·pp whose product is 8, or layout auto"
    problems = judge("cp=512", model=GPT2, seq=2048)
    assert [problem.fix for problem in problems] == ["recipe.seq = 1024"]
    (too_long,) = judge("cp=1024", model=GPT2, seq=2048)
    assert too_long.fix == "recipe.seq = 1024 or less"


DEGREE = st.sampled_from([1, 1, 2, 3, 4, 6, 8, 16])


@settings(max_examples=150)
@given(
    st.fixed_dictionaries(
        {"dp": DEGREE, "fsdp": DEGREE, "tp": DEGREE, "cp": DEGREE, "pp": DEGREE, "ep": DEGREE},
        optional={
            "micro": DEGREE,
            "chunks": DEGREE,
            "schedule": st.sampled_from(SCHEDULES),
            "cp_kind": st.sampled_from(("ring", "ulysses")),
            "sp": st.booleans(),
        },
    ),
    st.sampled_from([TINY, GPT2, MIXTRAL, DEEPSEEK, PRESETS["qwen2-7b"]]),
    st.integers(1, 200),
    st.sampled_from([1, 255, 256, 1000, 1500]),
    st.sampled_from([None, H100, LOCAL]),
    st.booleans(),
)
def test_following_the_fixes_leads_to_a_legal_layout(
    fields: dict[str, Any], model: Model, batch: int, seq: int, cluster: Cluster | None, strict: bool
) -> None:
    layout, recipe = Layout(**fields), Recipe(seq=seq, batch=batch)
    for _ in range(30):
        problems = violations(layout, model, recipe, cluster, strict)
        readable = [p.fix for p in problems if not re.search("product|or less|auto|strict", p.fix)]
        if not readable:
            break
        for fix in readable:
            assert not re.search(r"= ?(0|-\d+)\b", fix.replace("sp=0", ""))
        layout, recipe = apply(readable[0].split(" or ")[0], layout, recipe)
    assert not readable
    # Only the number of devices can be out of reach of any single value.
    assert all("device(s)" in problem.what for problem in problems)


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_nearest(wanted: int, unit: int) -> None:
    multiple, divisor = nearest_multiple(wanted, unit), nearest_divisor(wanted, unit)
    assert multiple % unit == 0
    assert multiple >= unit
    assert abs(multiple - wanted) <= max(unit / 2, unit - wanted)
    assert unit % divisor == 0


def test_the_smaller_of_two_equally_near() -> None:
    assert nearest_multiple(6, 4) == 4
    assert nearest_multiple(10, 4) == 8
    assert nearest_multiple(1, 4) == 4
    assert nearest_divisor(3, 8) == 2
    # Beyond what a float can tell apart.
    assert nearest_multiple(10**18 + 1, 10**18) == 10**18


def test_huge_values_are_judged_at_once() -> None:
    problems = judge("dp=999999937,pp=999999937,tp=999999937", batch=10**9, seq=10**9)
    assert all(problem.fix for problem in problems)


def test_fp8_needs_whole_tiles() -> None:
    """Of every rank's widths and of a micro-batch's tokens; the fix is the nearest value that has them."""

    def judged(layout: str, model: Model, seq: int = 256) -> list[Problem]:
        recipe = RECIPE.model_copy(update={"seq": seq, "precision": "fp8"})
        return violations(Layout.parse(layout), model, recipe)

    llama = PRESETS["llama3.2-1b"]
    assert judged("tp=8", llama) == [] == judged("micro=2", llama, seq=8)
    narrow = llama.model_copy(update={"ffn": 8200})
    (problem,) = judged("tp=2", narrow)
    assert "MLP width 8200" in problem.what and problem.fix == 'recipe.precision = "bf16"'
    (problem,) = judged("tp=4", llama.model_copy(update={"ffn": 96}))
    assert "one of 4 tensor ranks' part" in problem.what and problem.fix == "tp=2"
    (problem,) = judged("micro=1", llama, seq=250)
    assert "250 tokens" in problem.what and "recipe.seq = 256" in problem.fix


def test_tensor_ranks_send_equal_shares_of_a_token_to_experts() -> None:
    narrow = PRESETS["tiny-moe"].model_copy(update={"hidden": 60, "heads": 8})
    (problem,) = judge("dp=2,tp=8,ep=2,sp=0", model=narrow)
    assert problem.what == "ep=2: tp=8 does not divide the hidden width 60 of tiny-moe"
    assert problem.fix == "tp=4 or ep=1"
    assert judge("dp=2,tp=4,ep=2,sp=0", model=narrow) == []
