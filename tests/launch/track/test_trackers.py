"""The real packages: a run is killed with its launcher, resumed in another layout, and is one curve in each of them."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.interfaces import LOOPBACK
from shoal.train.files import read_rows

pytestmark = pytest.mark.system

STEPS = 12
SYSTEM = {"system/cpu_percent", "system/memory_used"}
KEY = "wandb-key-of-the-launcher-0123456789abcd"
BLOCK = 32768


@pytest.fixture(scope="module")
def tracked(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, small_model: Path
) -> tuple[Path, list[dict[str, Any]]]:
    """The run's directory, and the rows that it had recorded when it was killed."""
    place = tmp_path_factory.mktemp("tracked")
    run = place / "run"
    # Offline W&B needs no key; where one is set, it must not be found in any of the run's files.
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TRACKIO_"))},
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEY,
        "TRACKIO_DIR": str(place / "trackio"),
    }
    values = {
        "model.path": small_model,
        "data.source": corpus,
        "data.cache": place / "cache",
        **{"recipe.seq": 32, "recipe.batch": 8, "recipe.steps": STEPS, "recipe.warmup": 2},
        **{"evaluate.every": 4, "evaluate.batches": 1, "checkpoint.every": 4, "cluster.on": "1xcpu"},
        **{f"track.{name}": "true" for name in ("tensorboard", "wandb", "mlflow", "trackio")},
    }
    sets = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]

    def start(layout: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal", "train", "--run", str(run), "--layout", layout, *sets],
            env=environment,
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    process = start("dp=1")
    # After a commit, between two: what comes after it is done again.
    deadline = time.monotonic() + 240
    while len(read_rows(run / "metrics.jsonl")) < 6:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = read_rows(run / "metrics.jsonl")
    # The process beside it outlives it, and tells the trackers of steps that are about to be done again.
    held: dict[str, Any] = {}
    while len(held) < 4 or min(each["step"] for each in held.values()) < len(before):
        assert time.monotonic() < deadline, held
        time.sleep(0.1)
        held = json.loads((run / "track.json").read_text()) if (run / "track.json").exists() else {}
    process = start("dp=2")
    told, _ = process.communicate(timeout=400)
    assert process.returncode == 0, told
    assert "failed" not in told, told
    return run, before


def once(steps: list[int]) -> None:
    assert sorted(steps) == list(range(1, STEPS + 1))


def test_metrics_have_both_layouts(tracked: tuple[Path, list[dict[str, Any]]]) -> None:
    run, before = tracked
    assert {row["world"] for row in before} == {1}
    assert read_rows(run / "metrics.jsonl")[-1]["world"] == 2
    assert json.loads((run / "heartbeat").read_text()) == STEPS
    once([row["step"] for row in read_rows(run / "metrics.jsonl")])


def test_tensorboard_has_one_curve(tracked: tuple[Path, list[dict[str, Any]]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = tracked
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("loss", "tokens_per_s", "memory_peak"):
        once([point.step for point in events.Scalars(name)])
    assert [point.step for point in events.Scalars("heldout_loss")] == [4, 8, 12]
    attached = {tag.partition("/")[0] for tag in events.Tags()["tensors"]}
    assert {"plan.json", "config.toml", "report.html"} <= attached
    for name in SYSTEM:
        assert events.Scalars(name)[-1].step == STEPS


def test_mlflow_has_one_curve(tracked: tuple[Path, list[dict[str, Any]]]) -> None:
    from mlflow import MlflowClient

    run, _ = tracked
    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("shoal")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["recipe.seq"] == "32" and found.data.tags["layout"].startswith("dp=2")
    for name in ("loss", "tokens_per_s", "memory_peak"):
        once([point.step for point in client.get_metric_history(found.info.run_id, name)])
    attached = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert {"plan.json", "config.toml", "report.html"} <= attached
    assert found.data.metrics.keys() >= SYSTEM
    # The report that is attached is of this call, all of it.
    page = Path(client.download_artifacts(found.info.run_id, "report.html", str(run.parent))).read_text()
    assert f"of {STEPS}</small>" in page and f"step {STEPS}</small>" in page and "going on" not in page


def test_trackio_has_one_curve(tracked: tuple[Path, list[dict[str, Any]]]) -> None:
    run, _ = tracked
    # Its folder is read once, when it is imported.
    program = """
import json
from trackio.sqlite_storage import SQLiteStorage
(record,) = SQLiteStorage.get_run_records("shoal")
print(json.dumps(SQLiteStorage.get_logs("shoal", record["name"]), default=str))
"""
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRACKIO_DIR": str(run.parent / "trackio")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = json.loads(said.splitlines()[-1])
    once([row["step"] for row in rows if "loss" in row])
    assert {name for row in rows for name in row} >= SYSTEM


def records(file: Path) -> Iterator[bytes]:
    """Of W&B's file of an offline run: LevelDB's log format after a header of seven bytes."""
    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        if kind == 0:
            return
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_has_one_curve(tracked: tuple[Path, list[dict[str, Any]]]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    run, _ = tracked
    steps, names, found = [], set(), set()
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for content in records(file):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                names.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
                }
                found |= values.keys()
                if "loss" in values:
                    steps.append(record.history.step.num)
    assert len(names) == 1 and found >= SYSTEM
    attached = {path.name for path in (run / "wandb").glob("offline-run-*/files/*")}
    assert {"plan.json", "config.toml", "report.html"} <= attached
    once(steps)


def test_no_file_of_the_run_has_the_key(tracked: tuple[Path, list[dict[str, Any]]]) -> None:
    run, _ = tracked
    found = [path for path in run.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert found == []


def test_a_server_that_is_not_there_stops_no_run(settings: Callable[..., list[str]], tmp_path: Path) -> None:
    sets = [word for value in settings(track__mlflow=True) for word in ("--set", value)]
    ended = subprocess.run(
        [sys.executable, "-m", "shoal", "train", "--run", str(tmp_path / "run"), *sets],
        env={
            **os.environ,
            "MLFLOW_TRACKING_URI": f"http://{LOOPBACK}:9",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "track.mlflow" in line]
    assert "failed" in line and "the run goes on" in line
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 6
