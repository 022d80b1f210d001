"""Devices that are gone after a fault: the run goes on with those that are left, and is the same run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.conftest import Train, after_steps

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch import local
from shoal.launch.report import FINISHED
from shoal.observe.flight_recorder import FlightReader
from shoal.plan.refit import refit
from shoal.plan.report import plan_report
from shoal.plan.request import plan_request
from shoal.plan.resolve import Job, resolve
from shoal.train.run_directory import RunDirectory


def job(*overrides: str, layout: str) -> Job:
    return resolve(load(None, list(overrides), layout).config)


def test_the_run_goes_on_with_the_devices_that_are_left(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on a CPU need no devices, so how many there are is made up; all else is real."""
    options = {"run__strict": True, "recipe__steps": 25, "checkpoint__every": 3, "cluster__on": "4xcpu"}
    there = [4]
    monkeypatch.setattr(local, "devices_here", lambda job, visible: there[0])

    def lose_two() -> None:
        there[0] = 3
        snapshot = FlightReader(RunDirectory(tmp_path / "lost").flight(2)).look()
        assert snapshot is not None
        os.kill(snapshot.pid, signal.SIGKILL)

    with after_steps(tmp_path / "lost", 4, lose_two):
        lost = train("lost", "dp=2,fsdp=2", **options)
    assert lost.report.code == FINISHED, lost.report.message
    # Eight sequences do not divide over three devices.
    assert list(dict.fromkeys(row["world"] for row in lost.rows)) == [4, 2]
    assert lost.rows[-1]["layout"].startswith("dp=2")
    faults = [json.loads(line) for line in lost.directory.faults.read_text().splitlines()]
    assert [row["kind"] for row in faults] == ["killed", "devices", "restart"]
    assert faults[1]["message"].startswith("3 devices are left, but dp=2,fsdp=2")
    assert lost.directory.read_plan()["layout"] == lost.rows[-1]["layout"]
    whole = train("whole", "dp=1", **options)
    assert lost.hexes == whole.hexes and lost.tensors() == whole.tensors()


def test_of_a_gpu_cluster_the_planner_chooses() -> None:
    """What no longer fits as replicas is sharded over what is left."""
    whole = job(
        "model.preset=llama3-8b", "recipe.seq=8192", "recipe.batch=64", "cluster.on=8xH100", layout="fsdp=8"
    )
    left = refit(whole, 7)
    assert left.layout.world == left.cluster.devices == 4
    assert left.config == whole.config and left.model == whole.model


def test_what_is_left_is_laid_out_as_the_plan_would() -> None:
    recipe = ("recipe.seq=4096", "recipe.batch=64", "recipe.precision=bf16")
    whole = job("model.preset=llama3-8b", "cluster.on=8xH100", *recipe, layout="fsdp=8,micro=1")
    left = refit(whole, 7)
    planned = plan_report(plan_request("llama3-8b", "4xH100", seq=4096, batch=64)).chosen
    assert planned is not None and left.layout == planned.plan.layout
    huge = job("model.preset=llama3-405b", "cluster.on=8xH100", *recipe, layout="fsdp=8,micro=1")
    with pytest.raises(BadInput, match="no layout of llama3-405b runs on 1 device"):
        refit(huge, 1)  # neither one device nor its host and disks hold anything that the engine runs of it


def test_without_a_device_there_is_no_layout() -> None:
    with pytest.raises(BadInput, match="no layout"):
        refit(job("cluster.on=4xcpu", "recipe.batch=8", layout="dp=4"), 0)
