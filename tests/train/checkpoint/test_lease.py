"""The lock in an object store: it lives with its holder, and is taken over from one that is dead."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.facts.problem import BadInput
from shoal.train.checkpoint import lease
from shoal.train.checkpoint.lease import LOCK, leased
from shoal.train.checkpoint.object_store import ObjectStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """With a pace that tests can wait for."""
    for name, seconds in (("RENEW_SECONDS", 0.05), ("LAPSE_SECONDS", 1.0), ("LOOK_SECONDS", 0.02)):
        monkeypatch.setattr(lease, name, seconds)
    return ObjectStore(f"file://{tmp_path}/store/run")


def directory(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_a_live_run_elsewhere_keeps_others_out(store: ObjectStore, tmp_path: Path) -> None:
    said: list[str] = []
    with (
        leased(store, directory(tmp_path, "a"), said.append, lambda: None),
        pytest.raises(BadInput, match="is in use by a live run: process"),
        leased(store, directory(tmp_path, "b"), said.append, lambda: None),
    ):
        pass
    assert store.left(LOCK) is None and store.committed() == []


@pytest.mark.parametrize("whose", ["of this directory", "of a process that is gone", "that stands still"])
def test_what_a_dead_run_left_is_taken_over(
    whose: str, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, said = directory(tmp_path, "a"), list[str]()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found = {**lease._this_process(), "holder": "x", "directory": "other", "beat": 7}
    if whose == "of this directory":
        found["directory"] = lease._name_of(mine)
    elif whose == "of a process that is gone":
        found["process"] = gone.pid
    else:
        found["host"] = "elsewhere"
    store.leave(LOCK, json.dumps(found))
    with leased(store, mine, said.append, lambda: None):
        assert json.loads(store.left(LOCK) or "")["holder"] != "x"
    assert bool(said) == (whose == "that stands still")


def test_a_holder_notices_that_it_was_taken_for_dead(store: ObjectStore, tmp_path: Path) -> None:
    lost: list[bool] = []
    with leased(store, directory(tmp_path, "a"), lambda text: None, lambda: lost.append(True)):
        store.leave(LOCK, json.dumps({"holder": "x", "process": 1, "host": "elsewhere"}))
        for _ in range(200):
            if lost:
                break
            time.sleep(0.02)
    assert lost == [True]
    assert json.loads(store.left(LOCK) or "")["holder"] == "x"
