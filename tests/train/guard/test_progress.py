"""Of ranks what has changed since the last look is counted again, and comes to the same as counting all of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shoal.observe.flight_recorder import INPUT, STEP, Channel, Snapshot
from shoal.train.guard import progress
from shoal.train.guard.progress import ProgressTracker
from shoal.train.guard.stalls import Late, late_collective, late_collectives

CHANNELS = (
    Channel("0", "world", tuple(range(8))),
    *(Channel(f"tp-{first}", "tp", (first, first + 1)) for first in range(0, 8, 2)),
    Channel("pp", "pp", (0, 4), directed=True),
)


def begun() -> list[Snapshot]:
    return [
        Snapshot(100 + rank, 1, 1, STEP, 0, {one: 3 for one in CHANNELS if rank in one.ranks}, ())
        for rank in range(8)
    ]


def key(late: Sequence[Late]) -> set[tuple[Channel, int, tuple[int, ...]]]:
    return {(one.channel, one.number, one.missing) for one in late}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_late_is_what_all_of_it_would_say(seed: int) -> None:
    draw, seen, found = random.Random(seed), begun(), ProgressTracker()
    found.take(seen)
    for _ in range(200):
        before = seen
        seen = [*seen]
        for rank in draw.sample(range(8), draw.randint(0, 3)):
            counts = {one: count + draw.randint(0, 1) for one, count in seen[rank].counts.items()}
            phase, starved = draw.choice((STEP, INPUT)), seen[rank].starved + draw.choice((0.0, 0.1))
            seen[rank] = replace(seen[rank], counts=counts, phase=phase, starved=starved)
        if draw.random() < 0.02:
            found = ProgressTracker()  # as after ranks that were known to progress
            before = []
        found.take(seen)
        assert key(found.late) == key(late_collectives(seen))
        assert found.phases == {one.phase for one in seen}
        told = [(one.step, one.phase, sum(one.counts.values())) for one in seen]
        assert found.moved == (told != [(one.step, one.phase, sum(one.counts.values())) for one in before])
        waits = {
            rank: new.starved - old.starved for rank, (old, new) in enumerate(zip(before, seen, strict=False))
        }
        assert {rank: wait for rank, wait in waits.items() if wait} == found.waiting


def test_of_ranks_that_wait_nothing_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Channel] = []

    def counting(channel: Channel, snapshots: Sequence[Snapshot]) -> Late | None:
        counted.append(channel)
        return late_collective(channel, snapshots)

    monkeypatch.setattr(progress, "late_collective", counting)
    found, seen = ProgressTracker(), begun()
    seen[5] = replace(seen[5], counts=dict.fromkeys(seen[5].counts, 2))
    found.take(seen)
    assert set(counted) == {*CHANNELS}
    counted.clear()
    found.take([*seen])
    found.take([*seen[:3], replace(seen[3], beats=7, starved=0.2), *seen[4:]])
    assert not counted and not found.moved and found.waiting == {3: 0.2}
    assert {one.missing for one in found.late} == {(5,)}
    found.take([*seen[:5], replace(seen[5], counts=dict.fromkeys(seen[5].counts, 3)), *seen[6:]])
    assert set(counted) == {CHANNELS[0], CHANNELS[3]} and found.moved and not found.late
