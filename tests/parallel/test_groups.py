"""Parameters in several groups, each sharded over and copied to other ranks than the other: equal to one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.parallel.sharding import Case, assert_equal, place, train
from tests.ranks import run_ranks

from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import DENSE, ParameterGroup, RankGroup, parameter_groups
from shoal.facts.model.parameters import Parameter
from shoal.parallel.replicate import Replicate
from shoal.parallel.shards import ComposedReducer, GroupOf
from shoal.parallel.zero import ShardedStates


def ends_apart(layout: Layout) -> GroupOf:
    """Blocks as the layout has them; embedding, norm and head unsharded, a copy on every data rank."""
    blocks = parameter_groups(layout, experts=False, lora=False)[DENSE]
    everyone = RankGroup("data", layout.dp * layout.fsdp, layout.tp)
    ends = ParameterGroup("ends", RankGroup("none", 1, 1), everyone, layout.zero, trained=True)

    def group_of(parameter: Parameter) -> ParameterGroup:
        return ends if parameter.layer is None else blocks

    return group_of


def attention_apart(layout: Layout) -> GroupOf:
    """As experts are: attention sharded within one copy, everything else over the ranks of both."""
    blocks = parameter_groups(layout, experts=False, lora=False)[DENSE]
    everyone = RankGroup("data", layout.dp * layout.fsdp, layout.tp)
    rest = replace(blocks, name="rest", sharded=everyone, replicated=RankGroup("none", 1, 1))

    def group_of(parameter: Parameter) -> ParameterGroup:
        return blocks if parameter.kind == "attention" else rest

    return group_of


CASES = [
    Case("dp=2,fsdp=2,zero=1", groups=ends_apart),
    Case("dp=2,fsdp=2,zero=2", {"tied": True}, micro_batches=2, groups=ends_apart),
    Case("fsdp=2,zero=1,tp=2", {"tied": True, "kv_heads": 1}, groups=ends_apart),
    Case("fsdp=2,zero=2,pp=2", {"tied": True}, micro_batches=4, groups=ends_apart),
    Case("dp=2,fsdp=2,zero=1", {"tied": True}, groups=attention_apart),
    Case("dp=2,fsdp=2,zero=2", micro_batches=2, groups=attention_apart),
    Case("dp=2,fsdp=2,zero=1", {"tied": True}, strict=True, groups=attention_apart),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout} {case.groups.__name__}")
def test_groups_with_different_ranks_equal_one_process(case: Case) -> None:
    assert_equal(case, run_ranks(4, train, case))


def ways(rank: int, world: int, case: Case) -> list[str]:
    gradients = place(case, rank)[0].gradients
    assert isinstance(gradients, ComposedReducer)
    return [type(part).__name__ for part in gradients.parts]


def test_each_group_has_a_reducer_of_its_own() -> None:
    every = run_ranks(4, ways, CASES[0])
    assert all(set(found) == {Replicate.__name__, ShardedStates.__name__} for found in every)
