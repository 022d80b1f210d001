"""Kubernetes: one pod per node, as a JobSet or as a TrainJob of Kubeflow Trainer; a Dockerfile for the image.

Manifests are JSON, which kubectl accepts like YAML. The run directory is on a volume claim that all pods mount.
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
from shoal.launch.jobs.pod import NODE, OWNER, node_container, pod_template
from shoal.launch.jobs.record import JobRecord
from shoal.launch.jobs.state import JobState
from shoal.launch.jobs.targets import ask, last_words
from shoal.launch.report import STOPPED

MISSING = "run it where kubectl is and reaches the cluster; --dry-run shows the manifests anywhere"
QUEUE = "kueue.x-k8s.io/queue-name"
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


# Kubernetes needs an image with Shoal: what is built here is what --image names.
DOCKERFILE = f"""# docker build --tag REGISTRY/shoal:{__version__} --file Dockerfile PATH_OF_SHOAL
FROM python:3.11-slim
# A compiler for torch.compile; without the libraries of InfiniBand NCCL would use TCP, and not say so.
RUN apt-get update && apt-get install --yes --no-install-recommends \\
    g++ ibverbs-providers libibverbs1 librdmacm1 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/shoal
# These alone: what else lies there may be secret, or large.
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir '.[hf,data,track]'
RUN useradd --create-home --uid {OWNER} shoal
USER {OWNER}
ENTRYPOINT []
CMD ["shoal", "doctor"]
"""


def config_map(job: LaunchJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, config_name(job)),
        "data": {CONFIG: job.config},
    }


def config_name(job: LaunchJob) -> str:
    return f"{_name(job)}-config"


def job_set(job: LaunchJob) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(job),
        "spec": _job_set_spec(job, _job_spec(job)),
    }


def runtime(job: LaunchJob) -> dict[str, Any]:
    """The runtime that a TrainJob refers to: the same JobSet, in this namespace."""
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
    container = node_container(pod_template(job, config_name(job)))
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
        "metadata": _queued(job),
        "spec": spec,
    }


def _job_set_spec(
    job: LaunchJob, spec: dict[str, Any], metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    template = {"metadata": metadata, "spec": spec} if metadata else {"spec": spec}
    return {
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
        # A permanent failure would recur; a time limit or lost pods restart the whole set.
        "failurePolicy": {
            "maxRestarts": job.restarts,
            "rules": [
                {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
            ],
        },
    }


def _job_spec(job: LaunchJob) -> dict[str, Any]:
    """One pod per node; each is replaced individually, and finds the others again."""
    limit = {"activeDeadlineSeconds": job.time_limit} if job.time_limit else {}
    return {
        "completionMode": "Indexed",
        "completions": job.count.most,
        "parallelism": job.count.most,
        "backoffLimit": job.restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # A pod on a disrupted node is always replaced; so is one that stopped after a commit.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _exits([STOPPED])},
                {"action": "FailJob", "onExitCodes": _exits([1, 2])},
            ]
        },
        **limit,
        "template": pod_template(job, config_name(job)),
    }


def _exits(codes: list[int]) -> dict[str, Any]:
    return {"containerName": NODE, "operator": "In", "values": codes}


def _metadata(job: LaunchJob, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": job.namespace, "labels": {"app.kubernetes.io/name": "shoal"}}


def _queued(job: LaunchJob) -> dict[str, Any]:
    """Labels for Kueue, which admits all pods or none; without a queue Kubernetes places them one by one."""
    found = _metadata(job, _name(job))
    return {**found, "labels": {**found["labels"], QUEUE: job.queue}} if job.queue else found


def _name(job: LaunchJob) -> str:
    """A valid name: lower-case letters, digits and dashes, short enough for pod names of at most 63 characters."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in job.name.lower())
    return letters.strip("-")[:40].strip("-") or "shoal"


def check(job: LaunchJob) -> str:
    """Validate the manifests with Kubernetes (``--dry-run=server``), and find out which of the two kinds it
    supports.
    """
    if job.image is None:
        raise BadInput(
            "Kubernetes runs containers, and no image is named", "--image REGISTRY/shoal:TAG; see Dockerfile"
        )
    kind = _kind()
    if (before := _before(job, kind)) is not None and not before.over:
        raise BadInput(
            f"Kubernetes has a {kind} {_name(job)} already, which is {before.state}",
            f"another name: --set run.name=NAME; or kubectl delete {kind} {_name(job)} --namespace {job.namespace}",
        )
    for verb, manifest in _shown(job, kind):
        done = ask(["kubectl", verb, "--dry-run=server", "--filename", "-"], MISSING, json.dumps(manifest))
        if done.returncode:
            raise BadInput(
                f"Kubernetes does not take the {manifest['kind']}: {last_words(done)}", "see kubectl"
            )
    return f"Kubernetes takes it as a {kind}"


def _shown(job: LaunchJob, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """What the server validates before anything exists, with kubectl's arguments.

    A TrainJob is refused until its runtime exists, so the JobSet that both would produce is validated. It gets no fixed
    name, because an earlier job's may exist and a JobSet's template cannot be changed.
    """
    nameless = {name: value for name, value in _queued(job).items() if name != "name"}
    of_any_name = {**job_set(job), "metadata": {**nameless, "generateName": f"{_name(job)}-"}}
    settings = [("apply", config_map(job)), *([("apply", runtime(job))] if kind == "trainjob" else [])]
    return [*settings, ("create", of_any_name)]


def _kind() -> str:
    # It fails if any one of the cluster's extensions does not respond, but still lists the others.
    done = ask(["kubectl", "api-resources", "--output=name"], MISSING)
    there = done.stdout.split()
    if done.returncode and not there:
        raise BadInput(f"kubectl does not reach a cluster: {last_words(done)}", MISSING)
    for kind, resource in KINDS.items():
        if resource in there:
            return kind
    raise BadInput(
        "the cluster has neither Kubeflow Trainer nor JobSet", "install one of them, or ask for it"
    )


def _before(job: LaunchJob, kind: str) -> JobState | None:
    """The state of an existing job with this name, if there is one."""
    words = ["kubectl", "get", kind, _name(job), "--namespace", job.namespace, "--output=json"]
    done = ask([*words, "--ignore-not-found"], MISSING)
    if done.returncode:
        raise BadInput(f"kubectl get {kind}: {last_words(done)}", "see kubectl")
    return state_of(json.loads(done.stdout).get("status", {})) if done.stdout.strip() else None


def _manifests(job: LaunchJob, kind: str) -> list[dict[str, Any]]:
    return [config_map(job), *([runtime(job), train_job(job)] if kind == "trainjob" else [job_set(job)])]


def submit(job: LaunchJob) -> str:
    kind = _kind()
    if _before(job, kind) is not None:
        # It is over, and applying it again would not restart it.
        words = ["kubectl", "delete", kind, _name(job), "--namespace", job.namespace, "--timeout=100s"]
        if (done := ask(words, MISSING)).returncode:
            raise BadInput(f"kubectl delete of the {kind} before: {last_words(done)}", "see kubectl")
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
    if done.returncode and "NotFound" in done.stderr:
        return JobState(state.CANCELLED if record.asked_to_end else state.UNKNOWN, last_words(done))
    if done.returncode:
        raise BadInput(f"kubectl says nothing of {record.id}: {last_words(done)}", "ask again")
    return state_of(json.loads(done.stdout).get("status", {}))


def state_of(told: dict[str, Any]) -> JobState:
    """The state, from the conditions of a JobSet or a TrainJob."""
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
    """Delete it: its pods get SIGTERM, finish the step and commit within the grace period."""
    record.note_cancelled()
    words = ["kubectl", "delete", record.id, *_place(record), "--wait=false"]
    done = ask([*words, *(["--grace-period=0", "--force"] if now else [])], MISSING)
    if done.returncode:
        raise BadInput(f"kubectl delete: {last_words(done)}", f"shoal status {record.run}")
    return f"{record.id} is deleted" + ("" if now else "; its pods finish the step, commit and end")


def _place(record: JobRecord) -> list[str]:
    return ["--namespace", record.job.namespace]
