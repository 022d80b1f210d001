"""Parameter groups, against ranks that are counted one by one."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import (
    ADAPTERS,
    DENSE,
    EXPERTS,
    ParameterGroup,
    RankGroup,
    communicators,
    parameter_groups,
)
from shoal.facts.layout.ranks import AXES, coordinates, line

degrees = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    layout = Layout(**{axis: draw(degrees) for axis in AXES}, ep=draw(st.sampled_from([1, 2, 3, 4, 6, 8])))
    assume(layout.dp * layout.fsdp * layout.cp % layout.ep == 0)
    # Neither inside a copy nor over whole copies, the ranks of a set of experts would not be evenly spaced.
    assume(layout.shards % layout.ep == 0 or layout.ep % layout.shards == 0)
    return layout


def listed(ranks: RankGroup) -> list[int]:
    """From rank 0 on."""
    return [number * ranks.stride for number in range(ranks.size)]


def set_of_experts(rank: int, layout: Layout) -> int:
    """Experts are on the fastest ``ep`` of the data and context ranks."""
    at = coordinates(rank, layout)
    return ((at["dp"] * layout.fsdp + at["fsdp"]) * layout.cp + at["cp"]) % layout.ep


@given(layouts())
def test_ranks_with_the_same_parameters_shard_or_copy_them(layout: Layout) -> None:
    groups = parameter_groups(layout, experts=True, lora=False)
    stage = [
        rank
        for rank in range(layout.world)
        if not any(coordinates(rank, layout)[one] for one in ("pp", "tp"))
    ]
    for group, alike in (
        (groups[DENSE], stage),
        (groups[EXPERTS], [rank for rank in stage if set_of_experts(rank, layout) == 0]),
    ):
        within = [rank for rank in alike if coordinates(rank, layout)["dp"] == 0]
        assert listed(group.sharded) == within
        # A copy that is spread over several values of ``dp`` has no shards left to tell apart.
        assert group.sharded.size * group.replicated.size == len(alike)
        assert set(listed(group.replicated)) <= set(alike)


@given(layouts())
def test_an_axis_is_what_its_line_is(layout: Layout) -> None:
    found = communicators(layout, kv_heads=1)
    for axis in AXES:
        assert listed(found[axis]) == line(0, axis, layout)
    assert listed(found["control"]) == list(range(layout.world))
    assert {set_of_experts(rank, layout) for rank in listed(found["ep"])} == set(range(layout.ep))


def named(layout: str, experts: bool = False, lora: bool = False) -> dict[str, ParameterGroup]:
    return parameter_groups(Layout.parse(layout), experts, lora)


def test_the_same_function_makes_every_group() -> None:
    """Mixtral over experts, LoRA over a frozen base, shards over fsdp·cp, states that wait elsewhere."""
    mixtral = named("dp=2,fsdp=4,ep=2", experts=True)
    assert mixtral[DENSE].sharded == RankGroup("fsdp", 4, 1) and mixtral[DENSE].replicated == RankGroup(
        "dp", 2, 4
    )
    assert mixtral[EXPERTS].sharded == RankGroup("fsdp/ep", 2, 2)
    assert mixtral[EXPERTS].replicated == RankGroup("dp/ep", 2, 4)
    lora = named("fsdp=2,tp=2", lora=True)
    assert {name: group.trained for name, group in lora.items()} == {DENSE: False, ADAPTERS: True}
    assert lora[ADAPTERS].sharded == RankGroup("fsdp", 2, 2)
    (context,) = named("fsdp=2,cp=2,tp=2").values()
    assert (context.sharded, context.zero) == (RankGroup("fsdp·cp", 4, 2), 3)
    (away,) = named("fsdp=2,zero=2,offload=optimizer").values()
    assert [str(part) for part in away.offload] == ["optimizer"] and away.zero == 2


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_experts_that_fill_a_copy_are_copied_less_often(ep: int) -> None:
    group = named(f"dp=4,fsdp=2,ep={ep}", experts=True)[EXPERTS]
    assert (group.sharded.size, group.replicated.size) == (1, 8 // ep)
