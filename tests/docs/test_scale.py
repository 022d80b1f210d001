"""The page says what was measured, what was measured keeps the targets, and a small world is measured again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import scale, scale_checkpoint, scale_exchange

from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.train.checkpoint import parts

DATA = json.loads(scale.DATA.read_text())


def test_the_table_is_what_was_measured() -> None:
    """If it is not: ``python benchmarks/scale.py --page``."""
    page = scale.PAGE.read_text()
    _, _, rest = page.partition(scale.BEGIN)
    assert rest.partition(scale.END)[0].strip().splitlines() == scale.rows(DATA)
    assert [int(world) for world in DATA["worlds"]] == [*scale.LAYOUTS]


def test_the_largest_world_keeps_the_targets() -> None:
    found = DATA["worlds"]["16384"]
    assert found["exchange"]["exchange_cpu_ms"] <= scale.TARGETS["exchange_cpu_ms"]
    assert found["exchange"]["late_exchange_cpu_ms"] <= scale.TARGETS["exchange_cpu_ms"]
    assert found["exchange"]["named"] == 16383
    assert found["sockets"]["most"] <= scale.TARGETS["sockets"]
    operations = [one["checkpoint"]["commit_operations_of_the_first_rank"] for one in DATA["worlds"].values()]
    assert max(operations) <= 4
    for who in ("launcher", "rank"):
        # A launcher of several nodes meets them; beyond that the number of ranks is nothing to either.
        started = [one["start"][who] for one in DATA["worlds"].values()]
        assert max(started) - min(started) <= 8 and max(started) <= scale.TARGETS["start_operations"]
    for name in ("resume", "resume_elsewhere"):
        resumed = found["checkpoint"][name]
        assert (
            resumed["bytes"] <= scale.TARGETS["resume_bytes"]
            and resumed["seconds"] <= scale.TARGETS["resume_s"]
        )
        assert resumed["operations"] <= 64 and resumed["parts"] >= 1


def test_sockets_are_counted_again() -> None:
    assert {int(world): one["sockets"] for world, one in DATA["worlds"].items()} == {
        world: scale.control_sockets(world) for world in scale.LAYOUTS
    }


def test_a_rank_of_a_small_world_opens_its_own_list_and_few_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MOST_LISTED", 0)
    place = scale_checkpoint.CountingStorage(tmp_path)
    ranks = scale_checkpoint.SyntheticRanks(PRESETS["llama3-8b"], Layout.parse("tp=2,pp=2,fsdp=4"))
    written = scale_checkpoint.write(ranks, place)
    assert written["commit_operations_of_a_rank"] == 2 and written["commit_operations_of_the_first_rank"] == 3
    for rank in (0, 3, 14):
        found = scale_checkpoint.resume("llama3-8b", "tp=2,pp=2,fsdp=4", rank, str(tmp_path))
        # Its own, and that of the tensor rank which has written what both hold alike.
        assert found["parts"] == 1 + rank % 2 and found["operations"] <= 9


@pytest.mark.long
def test_launchers_of_a_small_world_exchange() -> None:
    found = scale_exchange.measured(4, 32, exchanges=3)
    assert found["named"] == 31 and found["exchange_cpu_ms"] < 1000
