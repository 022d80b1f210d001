"""Manifests for Kubernetes, read by the models of Kubeflow Trainer and JobSet: what those do not know is a mistake.

The models drop what they do not know, so a manifest has to come back from them as it was.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Capture, shoal_

from shoal.launch.jobs.kubernetes import state_of

pytestmark = pytest.mark.system
MODELS = {
    "jobset.json": "JobsetV1alpha2JobSet",
    "runtime.json": "TrainerV1alpha1TrainingRuntime",
    "trainjob.json": "TrainerV1alpha1TrainJob",
}
# Whose keys are the user's own words.
FREE = {"labels", "requests", "limits", "data"}


@pytest.fixture
def written(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    words = ["--to", "kubernetes", "--set", "cluster.on=2x8xH100", "--set", "cluster.interface=eth0"]
    more = ["--layout", "fsdp=16", "--image", "registry/shoal:1", "--time", "4:00:00", "--dry-run", "--json"]
    code, out, err = shoal_(capsys, "launch", *words, *more, "--exclude", "gpu-3,gpu-7")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    files: dict[str, str] = json.loads(out)["files"]
    return files


def returned(file: str, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """As the models have understood it; None where they refuse it."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[system]'")
    try:
        found: dict[str, Any] = getattr(models, MODELS[file]).from_dict(copy.deepcopy(manifest)).to_dict()
    except ValueError:
        return None
    return found


def keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every key of the format's own stands."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not (path and path[-1] in FREE):
                yield (*path, name)
            yield from keys(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from keys(inner, (*path, index))


@pytest.mark.parametrize("file", MODELS)
def test_a_manifest_comes_back_as_it_was_and_no_typo_does(file: str, written: dict[str, str]) -> None:
    manifest = json.loads(written[file])
    assert returned(file, manifest) == manifest
    places = list(keys(manifest))
    assert len(places) > 15
    for *path, name in places:
        wrong = copy.deepcopy(manifest)
        inner = wrong
        for step in path:
            inner = inner[step]
        inner[f"{name}x"] = inner.pop(name)
        assert returned(file, wrong) != wrong, f"nothing noticed {name}x in {path}"


def test_pods_are_launchers_that_are_replaced_and_find_each_other(written: dict[str, str]) -> None:
    job = json.loads(written["jobset.json"])["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["activeDeadlineSeconds"]) == (2, 2, 14400)
    rules = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert rules["Ignore"]["onExitCodes"]["values"] == [75]
    assert rules["FailJob"]["onExitCodes"]["values"] == [1, 2]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"][0] == {
        "key": "kubernetes.io/hostname",
        "operator": "NotIn",
        "values": ["gpu-3", "gpu-7"],
    }
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["command"][:3] == ["shoal", "train", "/etc/shoal/config.toml"]
    assert container["command"][-4:] == ["--nodes", "2", "--node", "node-$(NODE_INDEX)"]
    # What is mounted has a volume, and the config is the one that was written.
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    config = json.loads(written["configmap.json"])
    assert pod["volumes"][1]["configMap"]["name"] == config["metadata"]["name"]
    assert 'layout = "fsdp=16"' in config["data"]["config.toml"]
    train = json.loads(written["trainjob.json"])["spec"]
    assert train["runtimeRef"]["name"] == json.loads(written["runtime.json"])["metadata"]["name"]
    assert train["trainer"]["command"] == container["command"]
    assert written["Dockerfile"].count("FROM ") == 1


def test_conditions_are_states() -> None:
    done = {"type": "Completed", "status": "True", "message": "jobset completed successfully"}
    assert state_of({"conditions": [done], "restarts": 2}, False).state == "finished"
    assert state_of({"conditions": [{"type": "Failed", "status": "True"}]}, False).state == "failed"
    assert state_of({"conditions": [{"type": "Failed", "status": "False"}]}, False).state == "pending"
    assert state_of({"replicatedJobsStatus": [{"name": "node", "ready": 1}]}, False).state == "running"


def test_without_kubectl_or_an_image_there_is_one_line(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["launch", "--to", "kubernetes", "--set", "cluster.on=8xH100", "--layout", "fsdp=8", "--submit"]
    code, _, err = shoal_(capsys, *words)
    assert code == 2 and err.startswith(
        "error: Kubernetes runs containers, and no image is named\n  fix: --image"
    )
    code, _, err = shoal_(capsys, *words, "--image", "registry/shoal:1")
    assert code == 2 and err.startswith("error: kubectl is not on this machine\n  fix: ")
    assert list(tmp_path.iterdir()) == []
