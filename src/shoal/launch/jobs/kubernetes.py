"""Kubernetes: one pod per node, as a JobSet or as a TrainJob of Kubeflow Trainer; a Dockerfile for the image.

Manifests are JSON, which kubectl reads as it reads YAML. The run directory is on a claim that all pods mount.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.facts.problem import BadInput
from shoal.launch.jobs import state
from shoal.launch.jobs.job import CONFIG, LaunchJob
from shoal.launch.jobs.record import JobRecord
from shoal.launch.jobs.state import JobState
from shoal.launch.jobs.targets import ask, last_words
from shoal.launch.report import STOPPED

MISSING = "run it where kubectl is and reaches the cluster; --dry-run shows the manifests anywhere"
# Where pods find the claim and the config.
SHARED, ETC = "/shared", "/etc/shoal"
NODE = "node"
KINDS = {"trainjob": "trainjobs.trainer.kubeflow.org", "jobset": "jobsets.jobset.x-k8s.io"}


def write(job: LaunchJob) -> dict[str, str]:
    found = {
        "configmap.json": config_map(job),
        "jobset.json": job_set(job),
        "runtime.json": runtime(job),
        "trainjob.json": train_job(job),
    }
    texts = {name: json.dumps(manifest, indent=2) + "\n" for name, manifest in found.items()}
    return {**texts, "Dockerfile": DOCKERFILE}


# Kubernetes has no Shoal of its own: what is built here is what --image names.
DOCKERFILE = f"""# docker build --tag REGISTRY/shoal:{__version__} --file Dockerfile PATH_OF_SHOAL
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/shoal
COPY . .
RUN pip install --no-cache-dir '.[hf,data]'
RUN useradd --create-home shoal
USER shoal
ENTRYPOINT []
CMD ["shoal", "doctor"]
"""


def config_map(job: LaunchJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{_name(job)}-config"),
        "data": {CONFIG: job.config},
    }


def job_set(job: LaunchJob) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, _name(job)),
        "spec": _job_set_spec(job, _job_spec(job)),
    }


def runtime(job: LaunchJob) -> dict[str, Any]:
    """What a TrainJob refers to: the same JobSet, in this namespace."""
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, f"{_name(job)}-runtime"),
        "spec": {
            "mlPolicy": {"numNodes": job.count.most},
            "template": {"spec": _job_set_spec(job, _job_spec(job), step)},
        },
    }


def train_job(job: LaunchJob) -> dict[str, Any]:
    container = _container(job)
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": f"{_name(job)}-runtime",
        },
        "trainer": {
            "image": container["image"],
            "command": container["command"],
            "numNodes": job.count.most,
            "resourcesPerNode": container["resources"],
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, _name(job)),
        "spec": spec,
    }


def _job_set_spec(
    job: LaunchJob, spec: dict[str, Any], metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    template = {"metadata": metadata, "spec": spec} if metadata else {"spec": spec}
    return {
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
        # What failed for good would fail again; a time limit or lost pods start the whole set again.
        "failurePolicy": {
            "maxRestarts": job.restarts,
            "rules": [
                {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
            ],
        },
    }


def _job_spec(job: LaunchJob) -> dict[str, Any]:
    """One pod per node; each is replaced by itself, and finds the others again."""
    limit = {"activeDeadlineSeconds": job.time_limit} if job.time_limit else {}
    return {
        "completionMode": "Indexed",
        "completions": job.count.most,
        "parallelism": job.count.most,
        "backoffLimit": job.restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # A node that goes away has its pod replaced, however often; so has one that stopped after a commit.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _exits([STOPPED])},
                {"action": "FailJob", "onExitCodes": _exits([1, 2])},
            ]
        },
        **limit,
        "template": {"spec": _pod(job)},
    }


def _exits(codes: list[int]) -> dict[str, Any]:
    return {"containerName": NODE, "operator": "In", "values": codes}


def _pod(job: LaunchJob) -> dict[str, Any]:
    return {
        **_elsewhere(job),
        "restartPolicy": "Never",
        # SIGTERM has the step finished and committed; for so long.
        "terminationGracePeriodSeconds": job.warning,
        "automountServiceAccountToken": False,
        "containers": [_container(job)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "config", "configMap": {"name": f"{_name(job)}-config"}},
            # The default of 64 MiB has no room for NCCL, loaders and states in memory.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _elsewhere(job: LaunchJob) -> dict[str, Any]:
    """On no node that is excluded."""
    names = [name for name in (job.exclude or "").split(",") if name]
    if not names:
        return {}
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": names}
    wanted = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": wanted}}}


def _container(job: LaunchJob) -> dict[str, Any]:
    run = f"{SHARED}/{job.name}"
    train = job.train(f"{ETC}/{CONFIG}", run)
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return {
        "name": NODE,
        "image": job.image or f"shoal:{__version__}",
        "command": [*train, "--node", f"{NODE}-$(NODE_INDEX)"],
        "workingDir": SHARED,
        "env": [
            {"name": "NODE_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            # Data is tokenised once for all pods.
            {"name": "XDG_CACHE_HOME", "value": f"{SHARED}/.cache"},
        ],
        "resources": _resources(job),
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "config", "mountPath": ETC, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108
        ],
        # Ready as soon as a launcher leads the run, which the others see too.
        "readinessProbe": {"exec": {"command": ["test", "-e", f"{run}/.alive"]}, "periodSeconds": 10},
    }


def _resources(job: LaunchJob) -> dict[str, Any]:
    cores = {"cpu": str(job.cpus or (1 if job.on_gpus else job.devices))}
    if not job.on_gpus:
        return {"requests": cores}
    vendor = "amd.com/gpu" if job.device.startswith("MI") else "nvidia.com/gpu"
    return {"requests": cores, "limits": {vendor: str(job.devices)}}


def _metadata(job: LaunchJob, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": job.namespace, "labels": {"app.kubernetes.io/name": "shoal"}}


def _name(job: LaunchJob) -> str:
    """Kubernetes takes small letters, digits and dashes; its pods add to it, and 63 are all they may have."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in job.name.lower())
    return letters.strip("-")[:40].strip("-") or "shoal"


def check(job: LaunchJob) -> str:
    """Kubernetes' own opinion (``--dry-run=server``) of the manifests, and which of the two kinds it knows."""
    if job.image is None:
        raise BadInput(
            "Kubernetes runs containers, and no image is named", "--image REGISTRY/shoal:TAG; see Dockerfile"
        )
    kind = _kind(job)
    for manifest in _manifests(job, kind):
        done = ask(["kubectl", "apply", "--dry-run=server", "--filename", "-"], MISSING, json.dumps(manifest))
        if done.returncode:
            raise BadInput(
                f"Kubernetes does not take the {manifest['kind']}: {last_words(done)}", "see kubectl"
            )
    return f"Kubernetes takes it as a {kind}"


def _kind(job: LaunchJob) -> str:
    done = ask(["kubectl", "api-resources", "--output=name"], MISSING)
    if done.returncode:
        raise BadInput(f"kubectl does not reach a cluster: {last_words(done)}", MISSING)
    there = done.stdout.split()
    for kind, resource in KINDS.items():
        if resource in there:
            return kind
    raise BadInput(
        "the cluster has neither Kubeflow Trainer nor JobSet", "install one of them, or ask for it"
    )


def _manifests(job: LaunchJob, kind: str) -> list[dict[str, Any]]:
    return [config_map(job), *([runtime(job), train_job(job)] if kind == "trainjob" else [job_set(job)])]


def submit(job: LaunchJob) -> str:
    kind = _kind(job)
    for manifest in _manifests(job, kind):
        done = ask(["kubectl", "apply", "--filename", "-"], MISSING, json.dumps(manifest))
        if done.returncode:
            raise BadInput(f"kubectl apply of the {manifest['kind']}: {last_words(done)}", "see kubectl")
    return f"{kind}/{_name(job)}"


def by_hand(job: LaunchJob) -> str:
    words = ["kubectl", "apply"]
    for name in ("configmap.json", "jobset.json"):
        words += ["--filename", str(job.folder / name)]
    return shlex.join(words)


def status(record: JobRecord) -> JobState:
    done = ask(["kubectl", "get", record.id, *_place(record), "--output=json"], MISSING)
    if done.returncode:
        return JobState(state.UNKNOWN, last_words(done))
    return state_of(json.loads(done.stdout).get("status", {}), record.asked_to_end)


def state_of(told: dict[str, Any], asked: bool) -> JobState:
    """From the conditions of a JobSet or a TrainJob."""
    restarts = int(told.get("restarts", 0))
    true = [one for one in told.get("conditions", ()) if one.get("status") == "True"]
    words = {"Complete": state.FINISHED, "Completed": state.FINISHED, "Failed": state.FAILED}
    for one in true:
        if one["type"] in words:
            return JobState(words[one["type"]], str(one.get("message", ""))[:200], restarts=restarts)
    if any(one["type"] == "Suspended" for one in true):
        return JobState(state.PENDING, "suspended", restarts=restarts)
    active = sum(int(one.get("active", 0)) + int(one.get("ready", 0)) for one in _jobs(told))
    return JobState(state.RUNNING if active else state.PENDING, "", restarts=restarts)


def _jobs(told: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told.get("replicatedJobsStatus") or told.get("jobsStatus") or []
    return found


def logs(record: JobRecord, lines: int) -> str:
    label = f"jobset.sigs.k8s.io/jobset-name={record.id.partition('/')[2]}"
    words = ["kubectl", "logs", "--selector", label, *_place(record), "--prefix", f"--tail={lines}"]
    done = ask([*words, f"--max-log-requests={record.job.count.most}"], MISSING)
    return done.stdout if done.returncode == 0 else last_words(done)


def log_file(record: JobRecord) -> Path | None:
    return None


def cancel(record: JobRecord, now: bool) -> str:
    """Deleted: its pods get SIGTERM, finish the step and commit within the grace period."""
    record.note_cancelled()
    words = ["kubectl", "delete", record.id, *_place(record), "--wait=false"]
    done = ask([*words, *(["--grace-period=0", "--force"] if now else [])], MISSING)
    if done.returncode:
        raise BadInput(f"kubectl delete: {last_words(done)}", f"shoal status {record.run}")
    return f"{record.id} is deleted" + ("" if now else "; its pods finish the step, commit and end")


def _place(record: JobRecord) -> list[str]:
    return ["--namespace", record.job.namespace]
