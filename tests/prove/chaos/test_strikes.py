"""Faults as they are struck, when the campaign or the ranks have no processor for a while."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shoal.facts.config.file import load
from shoal.launch.local import prepared
from shoal.observe.flight_recorder import RESTORE, STEP
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import resolve
from shoal.prove.chaos.campaign import Campaign, CampaignSettings, InjectedFault
from shoal.prove.chaos.fault_kinds import BY_NAME
from shoal.prove.chaos.orders import FaultOrder, Orders
from shoal.prove.chaos.saboteur import FULL_SECONDS, Saboteur
from shoal.prove.chaos.schedule import Fault
from shoal.prove.chaos.verdict import steps_lost
from shoal.train.commits import CommitFailed
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """Of a run whose launcher does nothing."""
    made = Campaign(CampaignSettings(None, [], ["dp=1"], tmp_path / "run"))
    made.launches = 1
    made.orders.prepare()
    made._launchers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)]
    return made


def test_a_campaign_that_looks_late_takes_no_later_commit_for_a_lost_one(
    campaign: Campaign, tmp_path: Path
) -> None:
    """A rank was struck after step 4 was committed; when the campaign sees that, the run is at step 9."""
    order = FaultOrder(0, "SIGKILL", 0, STEP, 1)
    record = InjectedFault(0, "SIGKILL", STEP, 0, 1, "dp=1", resumed=4)
    try:
        campaign.orders.strike(order, 5, STEP, committed=4)
        (tmp_path / "run" / "checkpoints" / "step-00000009").mkdir(parents=True)
        campaign._wait_until_struck(record, order)
    finally:
        campaign._end()
    assert campaign._committed() == 9
    assert (record.step, record.committed) == (5, 4) and steps_lost([record]) == 0


def test_what_strikes_in_the_recovery_is_ordered_before_what_it_recovers_from(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the run may have recovered by then, and nothing would ever be struck."""
    given: list[int] = []
    give = Orders.give

    def seen(self: Orders, order: FaultOrder) -> None:
        give(self, order)
        given.append(order.number)
        # As ranks find it: the second one waits for the first, and both are there when that is struck.
        if order.after is None:
            assert sorted(path.stem for path in self.waiting.iterdir()) == ["0", "1"]
            raise KeyboardInterrupt

    monkeypatch.setattr(Orders, "give", seen)
    second = Fault(BY_NAME["SIGKILL"], RESTORE, 0.0, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            campaign._inject(Fault(BY_NAME["SIGKILL"], STEP, 0.0, 1, second))
    finally:
        campaign._end()
    assert given == [1, 0]


def test_a_disk_stays_full_until_it_has_refused_something(
    settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """However long it takes until the next commit."""
    job = resolve(load(None, settings(checkpoint__every=1), "dp=1").config)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.write_start(job, {}, {})
    dataset = prepared(job.config.data, Console(stderr=True))
    training = Training(job, run, dataset, Mesh(job.layout, 0, torch.device("cpu")))
    saboteur = Saboteur(run, 0)
    saboteur.orders.prepare()
    saboteur.meet(training)
    saboteur.orders.give(FaultOrder(0, "disk full", 0, STEP, 1))
    saboteur.enter(STEP, 1)
    time.sleep(FULL_SECONDS + 0.2)
    try:
        # Six steps may be over before there is room again.
        with contextlib.suppress(CommitFailed):
            training.run_to_end(bool)
    finally:
        saboteur.make_room()
    rows = read_rows(run.faults)
    assert rows[0]["kind"] == "commit failed" and "the disk is full" in rows[0]["action"]
    assert training.done == 6
