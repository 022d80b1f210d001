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
from tests.docs.shown import ROOT, blocks_of

from shoal.launch.jobs.kubernetes import state_of

pytestmark = pytest.mark.system
MODELS = {
    "jobset.json": "JobsetV1alpha2JobSet",
    "runtime.json": "TrainerV1alpha1TrainingRuntime",
    "trainjob.json": "TrainerV1alpha1TrainJob",
}
# The version whose schemas are asked.
KUBERNETES = "1.33"
# What may stand where the API knows a few words alone.
WORDS = {
    "apiVersion": {"v1", "jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1"},
    "apiGroup": {"trainer.kubeflow.org"},
    "kind": {"ConfigMap", "JobSet", "TrainingRuntime", "TrainJob"},
    "completionMode": {"Indexed", "NonIndexed"},
    "podReplacementPolicy": {"Failed", "TerminatingOrFailed"},
    "restartPolicy": {"Never", "OnFailure"},
    "action": {"Ignore", "FailJob", "Count", "FailIndex", "FailJobSet", "RestartJobSet"},
    "operator": {"In", "NotIn", "Exists"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "onJobFailureReasons": {"PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"},
    "medium": {"Memory"},
    "type": {"DisruptionTarget"},
    "key": {"kubernetes.io/hostname", "nvidia.com/gpu", "example.com/spot"},
    "fieldPath": {"metadata.annotations['batch.kubernetes.io/job-completion-index']"},
    "trainer.kubeflow.org/trainjob-ancestor-step": {"trainer"},
    "kueue.x-k8s.io/queue-name": {"research"},
}
# Whose keys are the user's own words.
FREE = {"labels", "annotations", "requests", "limits", "data"}
# What a cluster may want of its pods: as the page has it.
(POD,) = [text for _, kind, text in blocks_of((ROOT / "docs/clusters.md").read_text()) if kind == "yaml"]


@pytest.fixture
def written(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    words = ["--to", "kubernetes", "--set", "cluster.on=2x8xH100", "--set", "cluster.interface=eth0"]
    more = ["--layout", "fsdp=16", "--image", "registry/shoal:1", "--time", "4:00:00", "--dry-run", "--json"]
    (tmp_path / "pod.yaml").write_text(POD)
    more += ["--queue", "research", "--pod", "pod.yaml"]
    code, out, err = shoal_(capsys, "launch", *words, *more, "--exclude", "gpu-3,gpu-7")
    assert (code, err) == (0, "") and [path.name for path in tmp_path.iterdir()] == ["pod.yaml"]
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


def known(manifest: dict[str, Any]) -> bool:
    """Whether it fits the schema of Kubernetes' own kinds, without a key that is not in it."""
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[system]'")
    try:
        schemas.validate(manifest, KUBERNETES, strict=True)
    except schemas.ValidationError:
        return False
    return True


def own_kinds(written: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The config map, and the Job that the JobSet makes of its template."""
    made = json.loads(written["jobset.json"])["spec"]["replicatedJobs"][0]["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": made}
    return {"configmap": json.loads(written["configmap.json"]), "job": job}


@pytest.mark.parametrize("name", ["configmap", "job"])
def test_what_is_kubernetes_own_fits_its_schema_and_no_typo_does(name: str, written: dict[str, str]) -> None:
    manifest = own_kinds(written)[name]
    assert known(manifest)
    # These two choose the schema.
    for *path, key in (place for place in keys(manifest) if place not in {("apiVersion",), ("kind",)}):
        wrong = copy.deepcopy(manifest)
        inner = wrong
        for step in path:
            inner = inner[step]
        inner[f"{key}x"] = inner.pop(key)
        assert not known(wrong), f"nothing noticed {key}x in {path}"


def misspelt(manifest: Any) -> set[tuple[str, str]]:
    """Words that are none of those that may stand at their key."""
    if isinstance(manifest, list):
        return {found for inner in manifest for found in misspelt(inner)}
    if not isinstance(manifest, dict):
        return set()
    wrong = set()
    for key, value in manifest.items():
        for word in value if isinstance(value, list) else [value]:
            if key in WORDS and isinstance(word, str) and word not in WORDS[key]:
                wrong.add((key, word))
        wrong |= misspelt(value)
    return wrong


def test_words_are_those_that_stand_in_the_api_s_reference(written: dict[str, str]) -> None:
    """Schemas take any text for them; a cluster does not."""
    manifests = {name: text for name, text in written.items() if name.endswith(".json")}
    assert misspelt([json.loads(text) for text in manifests.values()]) == set()
    for key, words in WORDS.items():
        there = {
            word
            for word in words
            for text in manifests.values()
            if f'"{key}"' in text and f'"{word}"' in text
        }
        assert there, f"no manifest has {key}"
        for word in there:
            changed = [json.loads(text.replace(f'"{word}"', f'"{word}x"')) for text in manifests.values()]
            assert (key, f"{word}x") in misspelt(changed)


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
    assert container["command"][:3] == ["shoal", "train", "/etc/shoal/config.toml"]
    assert container["command"][-4:] == ["--nodes", "2", "--node", "node-$(NODE_INDEX)"]
    # Of the user's template: merged by name, added to lists, and nothing of ours is gone.
    assert container["envFrom"] == [{"secretRef": {"name": "shoal-keys"}}]
    assert [one["name"] for one in container["env"]] == ["NODE_INDEX", "XDG_CACHE_HOME", "NCCL_DEBUG"]
    assert [one["key"] for one in pod["tolerations"]] == ["nvidia.com/gpu", "example.com/spot"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "8", "memory": "1500Gi"}
    assert (pod["serviceAccountName"], pod["restartPolicy"]) == ("trainer", "Never")
    assert job["template"]["metadata"]["annotations"].keys() == {"kueue.x-k8s.io/podset-required-topology"}
    for file in ("jobset.json", "trainjob.json"):
        assert json.loads(written[file])["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    # What is mounted has a volume, and the config is the one that was written.
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    config = json.loads(written["configmap.json"])
    assert pod["volumes"][1]["configMap"]["name"] == config["metadata"]["name"]
    assert 'layout = "fsdp=16"' in config["data"]["config.toml"]
    train = json.loads(written["trainjob.json"])["spec"]
    assert train["runtimeRef"]["name"] == json.loads(written["runtime.json"])["metadata"]["name"]
    assert train["trainer"]["command"] == container["command"]
    assert train["trainer"]["resourcesPerNode"] == container["resources"]
    assert written["Dockerfile"].count("FROM ") == 1
    assert f"--uid {pod['securityContext']['fsGroup']} shoal" in written["Dockerfile"]


def test_conditions_are_states() -> None:
    done = {"type": "Completed", "status": "True", "message": "jobset completed successfully"}
    assert state_of({"conditions": [done], "restarts": 2}).state == "finished"
    assert state_of({"conditions": [{"type": "Failed", "status": "True"}]}).state == "failed"
    assert state_of({"conditions": [{"type": "Failed", "status": "False"}]}).state == "pending"
    assert state_of({"replicatedJobsStatus": [{"name": "node", "ready": 1}]}).state == "running"


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
