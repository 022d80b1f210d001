"""Which faults a campaign injects, and what counts as named right."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.prove.chaos.fault_kinds import BY_NAME, ENDS_LAUNCHER, IN_RECOVERY, KINDS, named_right
from shoal.prove.chaos.schedule import Fault, schedule


def every(faults: list[Fault]) -> list[Fault]:
    return [one for fault in faults for one in (fault, fault.second) if one is not None]


def test_a_campaign_of_three_hundred_is_what_it_should_be() -> None:
    faults = schedule(0, 300, [1, 2, 4])
    single = every(faults)
    assert len(single) == 300
    alone = {kind for kind in KINDS if kind.least_nodes == 1}
    assert {one.kind for one in single} == alone and len(alone) >= 20
    assert len({one.point for one in single}) >= 7
    assert sum(fault.second is not None for fault in faults) >= 30
    assert all(fault.second.point in IN_RECOVERY for fault in faults if fault.second is not None)
    assert sum(fault.kind.name in ENDS_LAUNCHER for fault in faults) >= 9


def test_single_nodes_are_struck_where_there_are_several() -> None:
    """Of these worlds the first two have no rank for each of three nodes, or not as many."""
    several = {kind for kind in KINDS if kind.least_nodes > 1}
    assert several
    assert not several & {one.kind for one in every(schedule(0, 100, [1, 2, 4], nodes=3))}
    assert several <= {one.kind for one in every(schedule(0, 100, [1, 2, 3], nodes=3))}


def test_the_seed_decides() -> None:
    assert schedule(3, 40, [1, 2]) == schedule(3, 40, [1, 2])
    assert schedule(3, 40, [1, 2]) != schedule(4, 40, [1, 2])


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_as_many_as_asked_for(count: int) -> None:
    for seed in range(20):
        assert len(every(schedule(seed, count, [2]))) == count


def test_nobody_waits_for_a_rank_that_is_alone() -> None:
    kinds = Counter(fault.kind.name for fault in schedule(0, 100, [1], [*KINDS]))
    assert not kinds["SIGSTOP"] and not kinds["closed connections"] and kinds["SIGKILL"]


def test_what_is_named_right() -> None:
    row = {"kind": "killed", "rank": 1, "message": "rank 1 failed: killed by SIGKILL"}
    assert named_right(BY_NAME["SIGKILL"], 1, [row]) is True
    assert named_right(BY_NAME["SIGKILL"], 0, [row]) is False
    assert named_right(BY_NAME["SIGSEGV"], 1, [row]) is False
    assert named_right(BY_NAME["SIGKILL"], 1, []) is False
    assert named_right(BY_NAME["clock jump"], 1, []) is None
    lost = {"kind": "node lost", "rank": 2, "node": "n1", "message": "rank 2 is gone: node n1 ..."}
    assert named_right(BY_NAME["one node SIGKILL"], -1, [lost], "n1") is True
    assert named_right(BY_NAME["one node SIGKILL"], -1, [lost], "n0") is False
