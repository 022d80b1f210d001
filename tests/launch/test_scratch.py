"""A launcher looks at the scratch directory before it starts ranks, where the layout needs one."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import Train, after_steps, workers

from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.launch.local import check_memory
from shoal.launch.report import FAILED, FINISHED
from shoal.launch.scratch import check_scratch, clear_scratch
from shoal.parallel.offload.scratch import PREFIX, Scratch
from shoal.plan.resolve import Job, resolve
from shoal.train.files import read_rows
from shoal.train.scratch_files import scratch_root

# What changes no number, and shows all that reads states from files and puts them there.
EVERYTHING = {"checkpoint__memory": 1, "fault__check_every": 2, "evaluate__every": 3}


def job(layout: str, **offload: str) -> Job:
    config = Config.model_validate({"layout": layout, "cluster": {"on": "1xcpu"}, "offload": offload})
    return resolve(config)


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
        "shoal.launch.scratch.scratch_problems", lambda root, size, made_by_us, run: needed.append(size) or []
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


def test_states_in_files_change_no_bit_of_a_run(train: Train, tmp_path: Path) -> None:
    """Nor does continuing with them in memory, or elsewhere."""
    options = {**EVERYTHING, "recipe__steps": 8}
    memory = train("memory", "fsdp=2,offload=optimizer", **options)
    disk = tmp_path / "disk"
    disk.mkdir()
    files = train("files", "fsdp=2,offload=optimizer@nvme", **options, offload__scratch=disk)
    assert files.report.code == memory.report.code == FINISHED, files.report.message
    assert files.hexes == memory.hexes
    assert files.tensors() == memory.tensors()
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    "states",
    [pytest.param("optimizer", marks=pytest.mark.long), pytest.param("params", marks=pytest.mark.full)],
)
def test_a_launcher_that_is_killed_leaves_files_which_the_next_start_removes(
    train: Train, settings: Callable[..., list[str]], tmp_path: Path, states: str
) -> None:
    layout = f"fsdp=2,recompute=full,offload={states}@nvme+activations@nvme"
    options = {**EVERYTHING, "recipe__steps": 40, "checkpoint__every": 10}
    values = [word for value in settings(**options) for word in ("--set", value)]
    command = [sys.executable, "-m", "shoal", "train", "--layout", layout, "--run", str(tmp_path / "run")]
    launcher = subprocess.Popen([*command, *values], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics, root = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "scratch"
    while len(read_rows(metrics)) < 3:
        assert launcher.poll() is None
        time.sleep(0.05)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    left = {path.name for path in root.glob(f"{PREFIX}*/*")}
    assert "00000.exp_avg" in left and "activation-00000" in left, "kill -9 leaves files"
    done = len(read_rows(metrics))
    assert done < 40
    continued = train("run", layout, **options)
    assert continued.report.code == FINISHED, continued.report.message
    assert not root.exists()
    whole = train("whole", layout, **options)
    assert continued.hexes == whole.hexes
    assert continued.tensors() == whole.tensors()


@pytest.mark.long
def test_a_disk_that_gives_back_other_bytes_is_named_and_the_run_goes_on(
    train: Train, tmp_path: Path
) -> None:
    options = {"recipe__steps": 24, "checkpoint__every": 2}

    def damage() -> None:
        """Until it is read before it is written again."""
        for _ in range(1000):
            for file in (tmp_path / "run" / "scratch").glob(f"{PREFIX}*/00003.exp_avg"):
                with suppress(OSError), file.open("r+b") as opened:
                    opened.write(os.urandom(64))
                    os.fsync(opened.fileno())
            if (tmp_path / "run" / "faults.jsonl").exists():
                return

    with after_steps(tmp_path / "run", 6, damage):
        run = train(layout="offload=optimizer@nvme", **options)
    assert run.report.code == FINISHED, run.report.message
    first, *_ = (json.loads(line) for line in run.directory.faults.read_text().splitlines())
    assert first["kind"] == "disk" and "00003.exp_avg gave back other bytes" in first["message"]
    assert run.hexes == train("whole", "offload=optimizer@nvme", **options).hexes


def test_a_disk_that_fills_up_in_a_step_keeps_the_last_commit(train: Train, tmp_path: Path) -> None:
    """The kernel refuses every byte beyond a file's first block, as a full disk would."""
    options = {"recipe__steps": 40, "checkpoint__every": 8, "fault__max_restarts": 0}

    def fill() -> None:
        for worker in workers():
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (4096, 4096))

    with after_steps(tmp_path / "run", 20, fill):
        run = train(layout="offload=optimizer@nvme", **options)
    assert run.report.code == FAILED and run.report.step in (8, 16)
    assert run.report.message.startswith("rank 0 failed: the disk is full"), run.report.message
    assert not (tmp_path / "run" / "scratch").exists()
    continued = train(layout="offload=optimizer@nvme", **options)
    assert continued.report.code == FINISHED, continued.report.message
    assert continued.hexes == train("whole", "offload=optimizer@nvme", **options).hexes


@pytest.mark.long
def test_a_disk_that_fails_in_a_step_keeps_the_last_commit(train: Train, tmp_path: Path) -> None:
    """What a state's file had is gone, and the kernel reads nothing there."""
    options = {"recipe__steps": 40, "checkpoint__every": 8, "fault__max_restarts": 0}

    def lose() -> None:
        """Until it is read before it is written again."""
        while not (tmp_path / "run" / "faults.jsonl").exists():
            for file in (tmp_path / "run" / "scratch").glob(f"{PREFIX}*/00003.exp_avg"):
                with suppress(OSError):
                    os.truncate(file, 0)

    with after_steps(tmp_path / "run", 20, lose):
        run = train(layout="offload=params@nvme", **options)
    assert run.report.code == FAILED and run.report.step in (8, 16, 24, 32)
    said, _, log = run.report.message.partition("\n")
    assert (
        said.startswith("rank 0 failed: ")
        and "00003.exp_avg cannot be read or written from byte 0 on" in said
    )
    assert "the disk is failing; offload.scratch = a directory on another one" in said and "its log" in log
    assert not (tmp_path / "run" / "scratch").exists()
    continued = train(layout="offload=params@nvme", **options)
    assert continued.report.code == FINISHED, continued.report.message
    assert continued.hexes == train("whole", "offload=params@nvme", **options).hexes


def test_states_in_files_need_no_memory() -> None:
    """What a launcher refuses before the start: on a CPU, which is its own host, files alone are elsewhere."""
    config = {
        "layout": "offload=optimizer@nvme",
        "model": {"preset": "llama2-7b"},
        "cluster": {"on": "1xcpu"},
    }
    asked = resolve(Config.model_validate(config))
    device = asked.cluster.device.model_copy(update={"memory_bytes": 60 * 2**30})
    small = replace(asked, cluster=asked.cluster.model_copy(update={"device": device}))
    check_memory(small)
    with pytest.raises(BadInput, match="optimizer states of llama2-7b take"):
        check_memory(replace(small, layout=Layout.parse("offload=optimizer")))
