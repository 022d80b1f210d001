"""The table of strategies is complete, and says what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shoal
from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import communicators
from shoal.facts.layout.ranks import AXES
from shoal.facts.ledger import CATEGORIES, HOST, PART_OF
from shoal.facts.strategies import BY_NAME, CONTROL, OWNERS, STRATEGIES, owners, purpose_of

SOURCE = Path(shoal.__file__).parent
TORCH = Path(torch.__file__).parent.parent


def test_every_key_of_a_layout_belongs_to_one_strategy() -> None:
    owned = [key for one in STRATEGIES for key in (one.key, *one.policies)]
    assert sorted(owned) == sorted(Layout.model_fields)
    assert len(BY_NAME) == len(STRATEGIES)
    assert all(key in Layout.model_fields for one in STRATEGIES for key in one.resets)


def test_a_key_without_a_strategy_is_an_error() -> None:
    class Wider(Layout):
        vp: int = 1

    with pytest.raises(LookupError, match="vp"):
        owners(Wider)


def test_a_strategy_without_a_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = (*STRATEGIES, BY_NAME["tensor"])
    monkeypatch.setattr("shoal.facts.strategies.STRATEGIES", twice)
    with pytest.raises(LookupError, match="tp, sp"):
        owners(Layout)
    fewer = tuple(one for one in STRATEGIES if one.key != "offload")
    monkeypatch.setattr("shoal.facts.strategies.STRATEGIES", fewer)
    with pytest.raises(LookupError, match="offload"):
        owners(Layout)


def test_every_file_is_there() -> None:
    for one in STRATEGIES:
        for file in (one.file, *one.elsewhere.values()):
            assert not file or (SOURCE / file).is_file(), file
        for place in one.made_in:
            assert ((TORCH if place.startswith("torch/") else SOURCE) / place).exists(), place
        assert one.file or not (one.made_in or one.elsewhere)
        assert all(key in one.policies for key, _ in one.elsewhere)


def test_memory_is_of_a_category_of_the_ledger() -> None:
    for one in STRATEGIES:
        assert one.memory in ("", *CATEGORIES, *PART_OF, HOST)
        assert one.memory or not one.made_in
    assert set(PART_OF.values()) <= set(CATEGORIES)


def test_every_group_of_ranks_has_a_purpose() -> None:
    assert {axis: purpose_of(axis) for axis in (*AXES, "ep")} == {
        "pp": "pipeline",
        "dp": "replicate",
        "fsdp": "shard",
        "cp": "context",
        "tp": "tensor",
        "ep": "expert",
    }
    for layout in (Layout(dp=4, fsdp=2, cp=2, tp=4, pp=2, ep=4), Layout(dp=4, fsdp=2, ep=2)):
        every = communicators(layout, kv_heads=2)
        purposes = {name: purpose_of(name) for name in every}
        assert purposes.pop("control") == CONTROL
        assert purposes["pp ends"] == "pipeline" and purposes["tp copies"] == "tensor"
        assert (
            purposes["dp/ep"] == "replicate"
            and purposes["fsdp·cp/ep" if layout.cp > 1 else "fsdp/ep"] == "shard"
        )
        # What a step may wait for is told in words.
        assert all(all(BY_NAME[purpose].exposed) for purpose in purposes.values())
    with pytest.raises(KeyError):
        purpose_of("vp")


@pytest.mark.parametrize(
    ("layout", "working", "files"),
    [
        ("dp=1", [], []),
        ("dp=2,micro=1", ["dp", "micro"], ["parallel/replicate.py", "train/step.py"]),
        ("fsdp=2,unit=2", ["fsdp"], ["parallel/shard.py"]),
        ("fsdp=2,zero=1", ["fsdp"], ["parallel/zero.py"]),
        ("fsdp=2,zero=2", ["fsdp"], ["parallel/zero.py"]),
        ("tp=2,sp=0,pp=2,schedule=zbv", ["tp", "pp"], ["parallel/tensor.py", "parallel/pipeline.py"]),
        (
            "recompute=full,offload=params",
            ["recompute", "offload"],
            ["parallel/recompute.py", "parallel/offload/activations.py"],
        ),
        (
            "dp=2,cp=2,ep=2",
            ["cp", "ep", "dp"],
            ["parallel/ring.py", "parallel/experts.py", "parallel/replicate.py"],
        ),
    ],
)
def test_what_is_at_work_in_a_layout(layout: str, working: list[str], files: list[str]) -> None:
    parsed = Layout.parse(layout)
    found = [one for one in STRATEGIES if one.works(parsed)]
    assert [one.key for one in found] == working
    assert [one.file_in(parsed) for one in found] == files


def test_switched_off_a_strategy_says_so() -> None:
    for one in STRATEGIES:
        if one.key != "micro":
            assert not one.works(Layout.parse(f"{one.key}={one.off}"))
    assert OWNERS["zero"] is OWNERS["fsdp"]
