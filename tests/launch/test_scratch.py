"""A launcher looks at the scratch directory before it starts ranks, where the layout needs one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.launch.scratch import check_scratch, clear_scratch, scratch_root
from shoal.parallel.offload.scratch import PREFIX, Scratch
from shoal.plan.resolve import Job, resolve


def job(layout: str, **offload: str) -> Job:
    """Priced alike whether or not the engine runs the layout yet."""
    config = Config.model_validate({"layout": "dp=1", "cluster": {"on": "1xcpu"}, "offload": offload})
    return replace(resolve(config), layout=Layout.parse(layout))


def test_without_nvme_nothing_is_asked(tmp_path: Path) -> None:
    asked = job("recompute=full,offload=activations", scratch=str(tmp_path / "no"))
    assert scratch_root(asked, tmp_path) is None
    check_scratch(asked, tmp_path)
    clear_scratch(asked, tmp_path)


def test_by_default_it_is_below_the_run_directory(tmp_path: Path) -> None:
    asked = job("offload=optimizer@nvme")
    assert scratch_root(asked, tmp_path / "run") == tmp_path / "run" / "scratch"
    check_scratch(asked, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_said_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        check_scratch(job("offload=optimizer@nvme", scratch=str(tmp_path / "no")), tmp_path)
    with pytest.raises(BadInput, match="in memory"):
        check_scratch(job("offload=optimizer@nvme", scratch="/dev/shm"), tmp_path)


def test_the_ledger_says_how_much_room_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = job("offload=optimizer@nvme", scratch=str(tmp_path))
    needed: list[int] = []
    monkeypatch.setattr(
        "shoal.launch.scratch.scratch_problems", lambda root, size, made_by_us: needed.append(size) or []
    )
    check_scratch(asked, tmp_path)
    check_scratch(replace(asked, layout=Layout.parse("dp=4,offload=optimizer@nvme")), tmp_path, nodes=2)
    assert needed[0] > 0 and needed[1] == 2 * needed[0]


def test_what_a_killed_run_left_is_cleared_and_a_live_ones_is_not(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}dead-00000").mkdir()
    live = Scratch(tmp_path, "live", 0)
    clear_scratch(job("offload=optimizer@nvme", scratch=str(tmp_path)), tmp_path / "run")
    assert list(tmp_path.iterdir()) == [live.path]
    live.remove()
