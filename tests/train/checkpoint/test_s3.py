"""Checkpoints on a server that speaks S3: moto, on loopback. ``make test-system`` installs it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from tests.conftest import Train
from tests.train.checkpoint.test_object_store import commit, content, objects, upload

from shoal.facts.problem import BadInput
from shoal.launch.report import FINISHED, STOPPED
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.storage import Unreachable
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

pytestmark = pytest.mark.system

SECRET = "not-to-be-printed"
PART = 5 << 20  # the least that S3 takes for a part but the last


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address. A bucket of the name ``bucket`` is there, and this process has the right to it."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[system]'")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request would bury the failure
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    address = f"http://{host}:{port}"
    options = {"endpoint_url": address, "key": "someone", "secret": SECRET, "default_block_size": PART}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    # A new server has the objects of the last one, which was in the same process.
    urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST")).close()
    fsspec.filesystem("s3").mkdir("bucket")
    yield address
    moto.stop()


@pytest.fixture
def bucket(server: str) -> ObjectStore:
    return ObjectStore("s3://bucket/runs/run")


def test_a_checkpoint_goes_up_in_parts_and_comes_back(bucket: ObjectStore) -> None:
    bucket.check()
    assert objects(bucket) == []
    values = bytes(range(256)) * (3 * PART * 2 // 256)
    commit(bucket, 4, values=values)
    head = bucket.files.info(f"{bucket.root}/step-00000004/rank-00000-one-1.bin")
    assert head["size"] == 3 * PART
    # What was uploaded in parts has their number in its tag: here, two chunks that are each longer than a part.
    assert head["ETag"].strip('"').endswith("-2")
    assert bucket.committed() == [4] and content(bucket, 4) == values
    Checkpoint(bucket, 4).verify()


def test_torn_uploads_leave_nothing(bucket: ObjectStore) -> None:
    def torn() -> Iterator[memoryview]:
        yield memoryview(bytes(2 * PART))
        raise OSError("the process was interrupted")

    commit(bucket, 2)
    with pytest.raises(OSError, match="interrupted"):
        bucket.write(4, "one-1", "rank-00000.bin", torn())
    assert bucket.files.list_multipart_uploads("bucket") == []
    upload(bucket, 4, "one-1", bytes(64))
    assert bucket.committed() == [2]
    bucket.clear()
    assert [path for path in objects(bucket) if "step-00000004" in path] == []


def test_set_aside_removed_and_moved(bucket: ObjectStore) -> None:
    for step in (2, 4, 6):
        commit(bucket, step)
    bucket.files.pipe_file(f"{bucket.root}/step-00000006/rank-00001-one-1.bin", bytes(32))
    with pytest.raises(Damaged, match="BLAKE3"):
        Checkpoint(bucket, 6).verify()
    bucket.set_aside(6, "a bit has flipped")
    assert bucket.committed() == [2, 4]
    assert "step-00000006/damaged-manifest.json" in objects(bucket)
    bucket.remove(2)
    assert bucket.committed() == [4]
    old = bucket.beside(".old-1")
    assert old.empty and not bucket.empty
    bucket.move(old)
    assert bucket.empty and old.committed() == [4] and content(old, 4) == bytes(range(64))


def test_a_store_that_is_not_there_or_lets_nobody_in(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="bucket") as refused:
        ObjectStore("s3://no-such-bucket/runs/run").check()
    assert SECRET not in str(refused.value)
    nowhere = {"endpoint_url": "http://127.0.0.1:9", "key": "someone", "secret": SECRET}
    monkeypatch.setitem(fsspec.config.conf, "s3", nowhere)
    with pytest.raises(Unreachable, match="EndpointConnectionError"):
        ObjectStore("s3://bucket/runs/run").committed()
    with pytest.raises(BadInput, match="EndpointConnectionError") as refused:
        ObjectStore("s3://bucket/runs/run").check()
    assert SECRET not in str(refused.value)


def test_a_run_is_stopped_and_continues_in_another_layout_to_the_same_bits(
    server: str, settings: Callable[..., list[str]], train: Train, tmp_path: Path
) -> None:
    """As a user would: the command, and S3 from the environment."""
    options = {"recipe__steps": 30, "run__strict": True, "checkpoint__every": 10}
    environment = {
        **os.environ,
        "FSSPEC_S3_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }

    def start(layout: str) -> subprocess.Popen[str]:
        values = settings(**options, checkpoint__to="s3://bucket/runs")
        sets = [word for value in values for word in ("--set", value)]
        run = ["--run", str(tmp_path / "run"), "--layout", layout]
        command = [sys.executable, "-m", "shoal", "train", *sets, *run]
        return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)

    rows = tmp_path / "run" / "metrics.jsonl"
    stopped = start("dp=2")
    deadline = time.monotonic() + 90
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 12):
        assert time.monotonic() < deadline and stopped.poll() is None
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == STOPPED, said
    run = RunDirectory(tmp_path / "run")
    assert isinstance(run.disk, ObjectStore) and 12 <= run.step() < 30
    assert run.disk.committed() == [10, run.step()]

    continued = start("fsdp=2")
    _, more = continued.communicate(timeout=120)
    assert continued.returncode == FINISHED, more
    assert run.disk.committed() == [20, 30]
    # What is left: the kept checkpoints, and beside them the rows that a new directory would go on from.
    assert {path.partition("/")[0] for path in objects(run.disk) if not path.startswith("metrics-")} == {
        "step-00000020",
        "step-00000030",
    }
    whole = train("whole", "dp=1", **options)
    assert [row["loss_hex"] for row in read_rows(run.metrics)] == whole.hexes
    ours, theirs = Checkpoint(run.disk, 30), whole.checkpoint()
    for state, name in {(piece.state, piece.tensor) for piece in theirs.manifest.pieces}:
        assert ours.tensor(state, name).equal(theirs.tensor(state, name)), (state, name)
    logs = "".join(log.read_text() for log in run.logs.iterdir())
    assert SECRET not in said + more + logs + run.config.read_text() + run.manifest.read_text()
