"""``shoal train`` as a process of its own: signals, closed pipes and a launcher that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.launch.signals import STOP_SIGNALS
from shoal.train.files import read_rows

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(settings: Callable[..., list[str]], tmp_path: Path) -> Start:
    def run(layout: str = "dp=2", **overrides: object) -> subprocess.Popen[str]:
        sets = [word for value in settings(**overrides) for word in ("--set", value)]
        train = ["train", "--run", str(tmp_path / "run"), "--layout", layout]
        return subprocess.Popen(
            [sys.executable, "-m", "shoal", *train, *sets],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def listens(process: int) -> bool:
    """Whether it handles stop signals yet. Until its first lines have run, late on a busy machine, nobody could."""
    status = Path(f"/proc/{process}/status").read_text()
    (caught,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(caught >> (STOP_SIGNALS[-1] - 1) & 1)


def test_a_killed_launcher_takes_its_workers_along_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    """Not reaped, so that a zombie keeps the launcher's process id; and its pipes must close all the same."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    options = {"recipe__steps": 60, "checkpoint__every": 5}
    killed = start(**options)
    wait_until(lambda: len(read_rows(metrics)) >= 13)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.stderr is not None
    killed.stderr.read()  # ends when the last process that holds it does
    size = metrics.stat().st_size
    killed.wait()
    time.sleep(0.3)
    assert metrics.stat().st_size == size
    continued = start(**options)
    _, errors = continued.communicate(timeout=120)
    assert continued.returncode == 0, errors
    assert "resuming" in errors
    assert [row["step"] for row in read_rows(metrics)] == list(range(1, 61))


@pytest.mark.parametrize(
    "number,seconds",
    [
        (signal.SIGINT, 0.9),
        pytest.param(signal.SIGINT, 3.0, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 0.9, marks=pytest.mark.long),
        (signal.SIGUSR1, 3.0),
    ],
)
def test_a_stop_before_the_first_step_is_a_stop(start: Start, number: signal.Signals, seconds: float) -> None:
    """To the whole process group, as a terminal sends Ctrl-C; while torch is still being imported."""
    stopped = start(recipe__steps=2000)
    time.sleep(seconds)
    wait_until(lambda: listens(stopped.pid))
    os.killpg(stopped.pid, number)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 75, errors
    assert "Traceback" not in errors


def test_the_server_of_workers_ends_with_its_launcher(tmp_path: Path) -> None:
    """Even while it imports, which takes it half a minute on a busy machine: who reads our output would wait for it."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n"
    )
    launcher = (
        "import pathlib, time\n"
        "from shoal.launch.local import warm_workers\n"
        "warm_workers(['slow'])\n"
        "while not pathlib.Path('begun').exists(): time.sleep(0.01)\n"
    )
    words = [sys.executable, "-c", launcher]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_launcher_imports_nothing_that_trains() -> None:
    """It would take another second, in every process that leads or follows."""
    modules = "shoal.launch.supervisor, shoal.launch.nodes.leader, shoal.launch.nodes.follower"
    heavy = "[name for name in ('torch.distributed.tensor', 'shoal.train.loop') if name in sys.modules]"
    words = [sys.executable, "-c", f"import sys, {modules}\nprint({heavy})"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "then",
    [
        "raise AttributeError('half imported') from None",
        "pass\n    with stoppable(print, STOP_SIGNALS):\n        time.sleep(60)",
    ],
)
def test_a_stop_that_a_library_catches_while_it_is_imported_is_a_stop(then: str, tmp_path: Path) -> None:
    """As it happened with numpy: used half imported after that, or the run that followed knew of no stop."""
    (tmp_path / "caught.py").write_text(
        "import os, signal, time\n"
        "from shoal.cli.main import app, main\n"
        "from shoal.launch.signals import STOP_SIGNALS, stoppable\n"
        "def caught():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "    except BaseException:\n"
        f"        {then}\n"
        "app.command(caught, name='caught')\n"
        "main(['caught'])\n"
    )
    words = [sys.executable, "caught.py"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75 and "stopped on request" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_stop_while_a_library_runs_text_is_a_stop(tmp_path: Path) -> None:
    """As in an import that makes a dataclass: Python remembers such an interrupt beyond its end."""
    (tmp_path / "interrupted.py").write_text(
        "from shoal.cli.main import app, main\n"
        "app.command(lambda: exec('raise KeyboardInterrupt'), name='interrupted')\n"
        "main(['interrupted'])\n"
    )
    words = [sys.executable, "-m", "interrupted"]
    stopped = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert stopped.returncode == 75, stopped.stderr
    assert "stopped on request" in stopped.stderr


@pytest.mark.long
def test_a_signal_to_the_whole_group_commits(start: Start, tmp_path: Path) -> None:
    stopped = start(recipe__steps=4000, checkpoint__every=0)
    wait_until(lambda: len(read_rows(tmp_path / "run" / "metrics.jsonl")) >= 5)
    for _ in range(3):
        os.killpg(stopped.pid, signal.SIGTERM)
    out, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 75, errors
    assert "committed" in out
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_closed_pipe_ends_the_workers_too(start: Start, tmp_path: Path) -> None:
    """As with ``2>&1 | head``: nobody reads any more, so nobody may go on training unseen."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    cut = start(recipe__steps=100_000, evaluate__every=5)
    assert cut.stderr is not None and cut.stdout is not None
    wait_until(lambda: len(read_rows(metrics)) >= 5)
    cut.stderr.close()
    assert cut.wait(timeout=60) != 0
    cut.stdout.read()
    size = metrics.stat().st_size
    time.sleep(0.3)
    assert metrics.stat().st_size == size
