"""Layouts as people write them, as Shoal prints them, and what they are told when they write them wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.facts.layout import (
    CONTEXT_KINDS,
    MOST,
    OFFLOADABLE,
    READERS,
    RECOMPUTES,
    SCHEDULES,
    Layout,
    Offload,
    accumulation,
    divisors,
    parse_layouts,
)
from shoal.facts.problem import BadInput

DEGREES = st.integers(1, 5) | st.integers(1, MOST)
OFFLOADS = st.lists(
    st.builds(
        Offload,
        what=st.sampled_from(OFFLOADABLE),
        fraction=st.just(1.0) | st.floats(0, 1, exclude_min=True),
        nvme=st.booleans(),
    ),
    unique_by=lambda part: part.what,
    max_size=3,
).map(tuple)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("dp", "fsdp", "unit", "tp", "cp", "pp", "chunks", "ep", "micro"), DEGREES),
    "zero": st.sampled_from((1, 2, 3)),
    "sp": st.booleans(),
    "cp_kind": st.sampled_from(CONTEXT_KINDS),
    "schedule": st.sampled_from(SCHEDULES),
    "recompute": st.sampled_from(RECOMPUTES),
    "offload": OFFLOADS,
}
LAYOUTS = st.fixed_dictionaries({}, optional=FIELDS).map(lambda fields: Layout(**fields))


@given(LAYOUTS)
def test_what_is_printed_is_read_back(layout: Layout) -> None:
    again = Layout.parse(str(layout))
    assert again == layout
    assert hash(again) == hash(layout)
    assert str(again) == str(layout)


@given(LAYOUTS, st.randoms(), st.sampled_from((",", " ", ", ", "\n", " , ", "\u00a0")))
def test_order_and_separators_do_not_matter(layout: Layout, random: Any, separator: str) -> None:
    pairs = str(layout).split(",")
    random.shuffle(pairs)
    assert Layout.parse(separator.join(pairs)) == layout


@given(LAYOUTS)
def test_printed_in_canonical_order(layout: Layout) -> None:
    keys = [pair.partition("=")[0] for pair in str(layout).split(",")]
    assert keys == [key for key in READERS if key in keys]


def test_the_readers_stand_in_canonical_order() -> None:
    written = "dp fsdp zero unit tp sp cp cp_kind pp schedule chunks ep micro recompute offload"
    assert list(READERS) == written.split() == list(Layout.model_fields)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("dp=1", "dp=1"),
        ("tp=2 fsdp=4", "fsdp=4,tp=2"),
        (" ,dp=2,, ", "dp=2"),
        ("dp=007", "dp=7"),
        ("micro=2", "micro=2"),
        ("pp=2,schedule=interleaved", "pp=2,schedule=interleaved"),
        ("pp=2,schedule=interleaved,chunks=2", "pp=2,schedule=interleaved"),
        ("pp=2,schedule=interleaved,chunks=4", "pp=2,schedule=interleaved,chunks=4"),
        ("pp=2,schedule=1f1b,chunks=1", "pp=2"),
        ("tp=2,sp=1", "tp=2"),
        ("tp=2,sp=0", "tp=2,sp=0"),
        ("cp=2,zero=1", "zero=1,cp=2"),
        ("fsdp=2,zero=3,unit=1", "fsdp=2"),
        ("recompute=none,offload=none", "dp=1"),
        ("offload=activations+optimizer:0.5@nvme", "offload=optimizer:0.5@nvme+activations"),
        ("offload=params:1.0+optimizer:.25", "offload=optimizer:0.25+params"),
        ("ep=4,dp=4", "dp=4,ep=4"),
    ],
)
def test_canonical_form(text: str, printed: str) -> None:
    assert str(Layout.parse(text)) == printed


@pytest.mark.parametrize(
    "idle",
    ["zero=1", "zero=2", "unit=4", "sp=0", "cp_kind=ulysses", "schedule=zbv", "chunks=8", "fsdp=1,zero=1"],
)
def test_an_idle_policy_is_accepted_does_nothing_and_is_not_printed(idle: str) -> None:
    assert Layout.parse(f"dp=2,{idle}") == Layout(dp=2)
    assert str(Layout.parse(f"dp=2,{idle}")) == "dp=2"


def test_a_policy_of_a_group_with_several_members_is_kept() -> None:
    assert Layout.parse("cp=2,zero=1,unit=2").zero == 1
    assert Layout.parse("fsdp=2,zero=2").zero == 2


def test_a_layout_built_in_python_is_as_canonical_as_one_that_was_read() -> None:
    parts = (Offload(what="activations"), Offload(what="optimizer", fraction=0.1))
    assert Layout(offload=parts) == Layout.parse("offload=optimizer:0.1+activations")
    for wrong in ({"dp": 0}, {"dp": -1}, {"dp": "1"}, {"dp": None}, {"tp": 1.5}, {"pp": 2, "schedule": []}):
        with pytest.raises(ValidationError):
            Layout(**wrong)
    with pytest.raises(ValidationError, match="twice"):
        Layout(offload=(Offload(what="params"), Offload(what="params")))
    for fraction in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValidationError):
            Offload(what="params", fraction=fraction)


def test_replace_derives_anew_what_was_not_written() -> None:
    layout = Layout.parse("pp=4,schedule=interleaved,micro=1")
    assert layout.replace(schedule="1f1b") == Layout.parse("pp=4,micro=1")
    assert layout.replace(pp=1) == Layout.parse("micro=1")
    assert Layout.parse("fsdp=2,zero=1").replace(fsdp=1, dp=2) == Layout(dp=2)


@given(LAYOUTS)
def test_world(layout: Layout) -> None:
    assert layout.world == layout.dp * layout.fsdp * layout.tp * layout.cp * layout.pp
    assert layout.data_ranks == layout.dp * layout.fsdp
    assert list(layout.degrees) == ["dp", "fsdp", "tp", "cp", "pp", "ep"]


@pytest.mark.parametrize(
    ("text", "batch", "micro", "accumulation"),
    [
        ("dp=1", 16, 16, 1),
        ("dp=2,fsdp=2", 16, 4, 1),
        ("dp=2,micro=2", 16, 2, 4),
        ("pp=4", 16, 4, 4),
        ("pp=3", 16, 4, 4),  # 16/3 does not divide; the largest that leaves at least three
        ("pp=4,schedule=zbv", 16, 2, 8),
        ("pp=4,schedule=dualpipev", 16, 2, 8),
        ("pp=4,schedule=interleaved", 16, 4, 4),
        ("pp=4,dp=2", 16, 2, 4),
        ("pp=8", 4, 1, 4),  # fewer sequences than stages: one each, and the pipeline is not filled
        ("pp=2", 7, 1, 7),
        ("pp=2", 999_999_937, 1, 999_999_937),  # a large prime, found without trying every number
    ],
)
def test_micro_batches(text: str, batch: int, micro: int, accumulation: int) -> None:
    layout = Layout.parse(text)
    assert layout.micro_batch(batch) == micro
    assert layout.accumulation(batch) == accumulation


@given(LAYOUTS, st.integers(1, 300))
def test_micro_batches_add_up_to_the_batch(layout: Layout, multiple: int) -> None:
    batch = layout.data_ranks * (layout.micro or 1) * multiple
    assert layout.data_ranks * layout.micro_batch(batch) * layout.accumulation(batch) == batch


@given(st.integers(1, 5000))
def test_divisors(total: int) -> None:
    assert divisors(total) == [part for part in range(1, total + 1) if total % part == 0]


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("", "layout: it is empty", "dp=1 is one rank alone; auto lets Shoal choose"),
        (" , ", "layout: it is empty", "auto"),
        ("dp", "layout: 'dp' has no value", "dp=…"),
        ("dp=", "layout: 'dp' has no value", "dp=…"),
        ("=4", "layout: '=4' has no key before its '='", "no spaces around '='"),
        ("dp=0", "layout: dp=0: must be a whole number from 1", "dp=1 or more"),
        ("dp=-1", "layout: dp=-1: must be a whole number", "dp=1 or more"),
        ("dp=1.5", "layout: dp=1.5: must be a whole number", "dp=1 or more"),
        ("dp=1e3", "layout: dp=1e3: must be a whole number", ""),
        ("dp=٤", "layout: dp=٤: must be a whole number", ""),
        ("dp=²", "layout: dp=²: must be a whole number", ""),
        ("dp=auto", "layout: dp=auto: must be a whole number", ""),
        ("dp=" + "9" * 5000, "must be a whole number from 1 to 1000000000", ""),
        ("dp=1,dp=2", "layout: 'dp' is given twice", "keep one dp=…"),
        ("dp=2;tp=2", "layout: dp=2;tp=2: must be", ""),
        ("DP=2", "layout: unknown key 'DP'", "did you mean 'dp'?"),
        ("ｄｐ=2", "layout: unknown key 'ｄｐ'", "known: "),
        ("shedule=1f1b", "layout: unknown key 'shedule'", "did you mean 'schedule'?"),
        ("auto", "layout: unknown key 'auto'", ""),
        ("zero=0", "layout: zero=0: must be 1, 2 or 3", "dp=N shards nothing"),
        ("sp=true", "layout: sp=true: must be one of 0, 1", "sp=0 or sp=1"),
        ("cp_kind=rings", "layout: cp_kind=rings: must be one of ring, ulysses", "cp_kind=ring"),
        ("schedule=1F1B", "must be one of gpipe", "schedule=1f1b"),
        ("recompute=all", "must be one of none, selective, full", "recompute=none or recompute=selective"),
        ("offload=cpu", "layout: offload=cpu: 'cpu' is not understood", "optimizer, params, activations"),
        ("offload=params:2", "2 is not a fraction of the params", "params:0.5"),
        ("offload=params:0", "0 is not a fraction of the params", "params:0.5"),
        ("offload=params:1.2.3", "'params:1.2.3' is not understood", ""),
        ("offload=params@nvme:0.5", "'params@nvme:0.5' is not understood", "params:0.5@nvme"),
        ("offload=params+params", "params is given twice", "keep one params"),
        ("offload=params+", "'' is not understood", ""),
        ("offload=none+params", "'none' is not understood", ""),
    ],
)
def test_what_is_wrong_is_said_with_its_fix(text: str, what: str, fix: str) -> None:
    with pytest.raises(BadInput) as caught:
        Layout.parse(text)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert fix in problem.fix
    assert problem.fix


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        Layout.parse("dp=x,dp=2,foo=1,tp,zero=9,offload=cpu+params:7 schedule=")
    assert [problem.what.split(":")[1].strip() for problem in caught.value.problems] == [
        "dp=x",
        "'dp' is given twice",
        "unknown key 'foo'",
        "'tp' has no value",
        "zero=9",
        "offload=cpu+params",
        "offload=cpu+params",
        "'schedule' has no value",
    ]


def test_of_several_layouts_too() -> None:
    assert parse_layouts(" dp=2; ;tp=2,dp=2;") == [Layout(dp=2), Layout(dp=2, tp=2)]
    assert parse_layouts(";") == []
    with pytest.raises(BadInput) as caught:
        parse_layouts("dp=0;fsdp=2;pd=2")
    found = [(problem.what.split(":")[1].strip(), problem.where) for problem in caught.value.problems]
    assert found == [("dp=0", "--layouts"), ("unknown key 'pd'", "--layouts")]


@given(st.text())
def test_any_text_is_read_or_refused_in_our_words(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except BadInput as error:
        assert all(problem.fix for problem in error.problems)
    else:
        assert Layout.parse(str(layout)) == layout


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([None, 1, 2, 3]), st.integers(1, 4))
def test_data_ranks_micro_batches_and_accumulation_make_up_the_batch(
    dp: int, fsdp: int, micro: int | None, each: int
) -> None:
    layout, batch = Layout(dp=dp, fsdp=fsdp, micro=micro), dp * fsdp * (micro or 1) * each
    size = layout.micro_batch(batch)
    assert layout.data_ranks * size * layout.accumulation(batch) == batch
    assert layout.accumulation(batch) == accumulation(batch, layout.data_ranks, size)
