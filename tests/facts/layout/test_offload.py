"""What is offloaded, and its bytes off the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.layout import Layout, Offload
from shoal.facts.layout.offload import (
    LANDED_AT_LEAST,
    RING,
    STAGED,
    STAGES,
    OffDevice,
    away_bytes,
    late_elements,
    leaves_early,
    off_device,
    offloaded,
    states_may_be_late,
    waiting,
)
from shoal.facts.recipe import Recipe


@pytest.mark.parametrize(
    ("sizes", "fraction", "first"),
    [
        ([10, 10, 10, 10], 1.0, 0),
        ([10, 10, 10, 10], 0.5, 2),
        ([10, 10, 10, 10], 0.25, 3),
        ([10, 10, 10, 10], 0.3, 2),
        ([30, 5, 5], 0.5, 0),  # the first piece alone is more than half
        ([5, 5, 30], 0.5, 2),
        ([10, 10], 0.001, 1),  # something is offloaded where something was asked for
        ([], 0.5, 0),
    ],
)
def test_the_cut(sizes: list[int], fraction: float, first: int) -> None:
    assert offloaded(sizes, fraction) == first


@given(
    st.lists(st.integers(0, 10**9), max_size=40),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1, exclude_min=True),
)
def test_no_more_stays_than_was_asked_for_and_one_more_piece_would_be_too_much(
    sizes: list[int], fraction: float, other: float
) -> None:
    first, stays = offloaded(sizes, fraction), (1 - fraction) * sum(sizes)
    assert sum(sizes[:first]) <= stays
    assert first == len(sizes) or sum(sizes[: first + 1]) > stays
    less, more = sorted([fraction, other])
    assert offloaded(sizes, more) <= offloaded(sizes, less)


def test_a_parameter_that_is_away_is_updated_away() -> None:
    def optimizer(text: str) -> str | None:
        found = waiting(Layout.parse(f"offload={text}").offload, "optimizer")
        return None if found is None else str(found)

    assert optimizer("params:0.5@nvme") == "optimizer:0.5@nvme"
    assert optimizer("optimizer:0.25+params:0.5@nvme") == "optimizer:0.5"
    assert optimizer("optimizer@nvme+params:0.5") == "optimizer@nvme"
    assert optimizer("activations") is None
    assert waiting((Offload(what="optimizer"),), "params") is None


def test_gradients_leave_where_a_backward_pass_completes_them() -> None:
    for text, early in (
        ("offload=optimizer", True),
        ("tp=2,offload=params:0.5", True),
        ("fsdp=2,offload=optimizer", True),
        ("dp=2,fsdp=2,offload=optimizer", True),
        ("fsdp=2,zero=2,offload=optimizer", True),
        ("dp=2,fsdp=2,zero=2,offload=optimizer", False),
        ("fsdp=2,zero=1,offload=optimizer", False),
        ("dp=2,offload=optimizer", False),
        ("pp=2,offload=optimizer", False),
        ("offload=activations", False),
        ("fsdp=2", False),
    ):
        assert leaves_early(Layout.parse(text)) is early, text


@pytest.mark.parametrize(
    ("recipe", "layout", "micro_batches", "expected"),
    [
        ({"precision": "bf16"}, "dp=1", 1, (4, 8, 2, 2, 2)),
        ({"precision": "bf16"}, "dp=1", 8, (4, 8, 4, 2, 2)),
        ({"precision": "bf16"}, "fsdp=4", 1, (4, 8, 2, 2, 2)),
        ({"precision": "bf16"}, "fsdp=4", 2, (4, 8, 4, 2, 2)),
        ({"precision": "bf16"}, "fsdp=4,zero=2", 1, (4, 8, 4, 2, 4)),
        ({"precision": "bf16", "reduce": "bf16"}, "fsdp=4,zero=2", 1, (4, 8, 2, 2, 2)),
        ({"precision": "bf16", "reduce": "bf16"}, "dp=4", 1, (4, 8, 4, 2, 4)),
        ({"precision": "bf16", "optimizer": "sgd"}, "dp=1", 1, (4, 4, 2, 2, 2)),
        ({"precision": "fp32"}, "dp=1", 1, (4, 8, 4, 4, 4)),
        ({"precision": "fp64"}, "dp=4", 3, (8, 16, 8, 8, 8)),
    ],
)
def test_bytes_by_recipe(
    recipe: dict[str, str], layout: str, micro_batches: int, expected: tuple[float, ...]
) -> None:
    parsed = Layout.parse(f"{layout},offload=optimizer")
    assert away_bytes(Recipe.model_validate(recipe), parsed, micro_batches) == expected


ALONE = Layout.parse("offload=optimizer")


def test_an_update_moves_28_bytes_a_parameter() -> None:
    each = away_bytes(Recipe(precision="bf16"), ALONE, 1)
    assert each.updated == 28
    assert away_bytes(Recipe(precision="bf16"), ALONE, 2).added == 10


def test_what_is_late_reads_its_gradient_twice() -> None:
    each = away_bytes(Recipe(precision="bf16"), ALONE, 1)
    assert (each.weight_first, each.late) == (16, 26)
    assert each.weight_first + each.late == each.updated + each.states + each.gradient


@pytest.mark.parametrize(
    ("recipe", "layout", "may"),
    [
        ({}, "offload=optimizer", True),
        ({"precision": "bf16"}, "fsdp=2,zero=1,offload=params", True),
        ({"states": "bf16"}, "offload=optimizer", False),
        ({"optimizer": "sgd"}, "offload=optimizer", False),
        ({}, "offload=optimizer@nvme", False),
        ({}, "offload=optimizer+params@nvme", False),
        ({}, "recompute=full,offload=activations", False),
    ],
)
def test_whose_states_may_be_late(recipe: dict[str, str], layout: str, may: bool) -> None:
    assert states_may_be_late(Recipe.model_validate(recipe), Layout.parse(layout)) is may


def test_no_more_is_late_than_there_is_time_for() -> None:
    assert late_elements(window=2.0, rate=100.0, elements=1000) == pytest.approx(170)
    assert late_elements(window=20.0, rate=100.0, elements=1000) == 1000


def test_where_they_wait() -> None:
    each = away_bytes(Recipe(precision="bf16"), ALONE, 1)
    memory, disk = (Offload(what="optimizer", nvme=nvme) for nvme in (False, True))
    assert off_device(each, 1600, 100, memory, False, 0, False) == OffDevice(1600 * 14, 0)
    assert off_device(each, 1600, 100, memory, False, 0, False, 1600).host == 1600 * 14 + 48 * 2
    # Of states in files a 32nd is in memory at once, of many a bounded number; what is one piece all together.
    assert off_device(each, 1600, 100, disk, False, 0, False) == OffDevice(3200 + 50 * 12, 1600 * 12)
    assert off_device(each, 1600, 100, disk, False, 600, False) == OffDevice(3200 + 600 * 12, 1600 * 12)
    assert off_device(each, 2**31, 100, disk, False, 2**30, False).host == 2**32 + RING * 12
    summed = away_bytes(Recipe(precision="bf16"), ALONE, 4)
    # Gradients to accumulate arrive two blocks' at a time, or a million's if blocks have less.
    assert off_device(summed, 1600, 100, memory, True, 0, False) == OffDevice(1600 * 16 + 3200 * 2, 0)
    assert off_device(summed, 2**24, 2**22, memory, True, 0, False).host == 2**24 * 16 + 2**23 * 2
    assert off_device(summed, 2**24, 0, memory, True, 0, False).host == 2**24 * 16 + 2 * LANDED_AT_LEAST * 2
    # With weights gradients are there too, and nothing but buffers in memory.
    assert off_device(each, 1600, 100, disk, False, 0, True) == OffDevice(
        STAGES * STAGED + 50 * 14, 1600 * 14
    )
    assert off_device(summed, 1600, 100, disk, True, 0, True) == OffDevice(
        2 * STAGES * STAGED + 50 * 16, 1600 * 16
    )
