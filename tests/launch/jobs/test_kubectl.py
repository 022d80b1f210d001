"""What ``kubectl`` is asked, and in which order, against a stand-in that has a cluster's rules (``kubectl.py``)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Capture, shoal_

BOTH = ["jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org"]
LAUNCH = [
    *("launch", "--to", "kubernetes", "--image", "registry/shoal:1", "--layout", "fsdp=16", "--run", "run"),
    *("--set", "cluster.on=2x8xH100", "--set", "cluster.interface=eth0", "--submit", "--no-follow"),
]


class Cluster:
    def __init__(self, place: Path) -> None:
        self.place = place / "cluster.json"
        self.change(resources=BOTH[:1], objects={}, asked=[])

    def change(self, **values: Any) -> None:
        known = json.loads(self.place.read_text()) if self.place.exists() else {}
        self.place.write_text(json.dumps({**known, **values}))

    def asked(self) -> list[str]:
        found: list[str] = json.loads(self.place.read_text())["asked"]
        self.change(asked=[])
        return found

    def conditions(self, key: str, *true: str) -> None:
        objects = json.loads(self.place.read_text())["objects"]
        objects[key]["status"] = {"conditions": [{"type": one, "status": "True"} for one in true]}
        self.change(objects=objects)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("kubectl.py")} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("KUBECTL_STATE", str(tmp_path / "cluster.json"))
    monkeypatch.chdir(tmp_path)
    return Cluster(tmp_path)


def state(capsys: Capture) -> str:
    code, out, err = shoal_(capsys, "status", "run", "--json")
    assert (code, err) == (0, "")
    found: str = json.loads(out)["state"]
    return found


def test_a_train_job_is_sent_once_its_runtime_is_there(cluster: Cluster, capsys: Capture) -> None:
    """A cluster refuses it before that, even in a dry run."""
    cluster.change(resources=BOTH)
    code, _, err = shoal_(capsys, *LAUNCH)
    assert code == 0 and "takes it as a trainjob" in err, err
    assert cluster.asked() == [
        *("api-resources --output=name", "get trainjob"),
        "apply --dry-run=server ConfigMap default-config",
        "apply --dry-run=server TrainingRuntime default-runtime",
        "create --dry-run=server JobSet default-",
        *("api-resources --output=name", "get trainjob"),
        "apply --filename ConfigMap default-config",
        "apply --filename TrainingRuntime default-runtime",
        "apply --filename TrainJob default",
    ]
    assert state(capsys) == "pending"


def test_what_is_over_is_sent_again_and_what_runs_is_not(cluster: Cluster, capsys: Capture) -> None:
    """Applied again, a job that has failed would stay as it is, and a run would never continue."""
    assert shoal_(capsys, *LAUNCH)[0] == 0
    cluster.conditions("JobSet/default", "Failed")
    assert state(capsys) == "failed"
    code, _, err = shoal_(capsys, *LAUNCH, "--set", "recipe.steps=7")
    assert code == 0, err
    assert "delete jobset" in cluster.asked() and state(capsys) == "pending"
    # Of another run directory, whose name is the same.
    code, _, err = shoal_(capsys, *["other" if word == "run" else word for word in LAUNCH])
    assert code == 2 and "has a jobset default already, which is pending\n  fix: another name" in err
    assert not Path("other").exists()


def test_a_server_that_is_down_is_not_the_end_of_a_job(cluster: Cluster, capsys: Capture) -> None:
    assert shoal_(capsys, *LAUNCH)[0] == 0
    cluster.change(down=True)
    code, _, err = shoal_(capsys, "status", "run")
    assert code == 2 and "kubectl says nothing of jobset/default: The connection" in err
    code, _, err = shoal_(capsys, *LAUNCH)
    assert code == 2 and "kubectl does not reach a cluster" in err
    cluster.change(down=False)
    assert shoal_(capsys, "cancel", "run")[0] == 0
    assert state(capsys) == "cancelled"
