"""The pod of one node on Kubernetes: what a launcher needs, and what the cluster requires of pods (``--pod``)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from shoal import __version__
from shoal.facts.problem import BadInput, did_you_mean
from shoal.launch.jobs.job import CONFIG, LaunchJob

# Where pods mount the claim and the config.
SHARED, ETC = "/shared", "/etc/shoal"
NODE = "node"
# User and group in the image that the Dockerfile builds.
OWNER = 1000
# For each list, the key by which its entries are matched with those of a user's template.
NAMED_BY = {"volumeMounts": "mountPath"}


def pod_template(job: LaunchJob, config_map: str) -> dict[str, Any]:
    """A Job's pod template: a spec, and metadata from a user's template."""
    template = {"spec": _pod(job, config_map)}
    if job.pod is None:
        return template
    _check(job.pod)
    given = deepcopy(job.pod)
    for container in given.get("spec", {}).get("containers", ()):
        container.setdefault("name", NODE)
    return _merged(template, given)


def node_container(template: dict[str, Any]) -> dict[str, Any]:
    """The container that trains; there may be others beside it."""
    containers: list[dict[str, Any]] = template["spec"]["containers"]
    return next(one for one in containers if one["name"] == NODE)


def _check(given: dict[str, Any]) -> None:
    """Refuse templates whose content would be dropped or merged wrongly. Kubernetes validates the spec itself."""
    known = ("metadata", "spec")
    if unknown := given.keys() - set(known):
        name = min(unknown)
        raise BadInput(f"--pod: a pod template has no {name!r}", did_you_mean(name, known))
    if wrong := [name for name, inner in given.items() if not isinstance(inner, dict)]:
        raise BadInput(f"--pod: {wrong[0]} is no table", "spec: {tolerations: [...]}, say")
    containers = given.get("spec", {}).get("containers", [])
    if not isinstance(containers, list) or not all(isinstance(one, dict) for one in containers):
        raise BadInput("--pod: spec.containers is no list of tables", "containers: [{envFrom: [...]}]")


def _merged(ours: Any, theirs: Any, name: str = "") -> Any:
    """Merge objects by key and lists by their entries' names; otherwise the user's value wins."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = {key: _merged(ours[key], theirs[key], key) for key in ours.keys() & theirs.keys()}
        return {**ours, **theirs, **both}
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return theirs
    by = NAMED_BY.get(name, "name")
    found = list(ours)
    for entry in theirs:
        called = entry.get(by) if isinstance(entry, dict) else None
        same = [
            i for i, one in enumerate(found) if called and isinstance(one, dict) and one.get(by) == called
        ]
        if same:
            found[same[0]] = _merged(found[same[0]], entry)
        else:
            found.append(entry)
    return found


def _pod(job: LaunchJob, config_map: str) -> dict[str, Any]:
    return {
        **_elsewhere(job),
        **_tolerated(job),
        "restartPolicy": "Never",
        # After SIGTERM, time to finish the step and commit.
        "terminationGracePeriodSeconds": job.warning,
        "automountServiceAccountToken": False,
        # A claim belongs to root, and the image's user is not root.
        "securityContext": {"fsGroup": OWNER, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [_container(job)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "config", "configMap": {"name": config_map}},
            # The default of 64 MiB is too small for NCCL, data loaders and in-memory checkpoints.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _elsewhere(job: LaunchJob) -> dict[str, Any]:
    """Affinity that avoids excluded nodes."""
    names = [name for name in (job.exclude or "").split(",") if name]
    if not names:
        return {}
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": names}
    wanted = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": wanted}}}


def _tolerated(job: LaunchJob) -> dict[str, Any]:
    """Tolerations: GPU nodes often accept only pods that ask for them."""
    if not job.on_gpus:
        return {}
    return {"tolerations": [{"key": _vendor(job), "operator": "Exists", "effect": "NoSchedule"}]}


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
        # Ready as soon as a launcher leads the run, which the other pods see too.
        "readinessProbe": {"exec": {"command": ["test", "-e", f"{run}/.alive"]}, "periodSeconds": 10},
    }


def _resources(job: LaunchJob) -> dict[str, Any]:
    cores = {"cpu": str(job.cpus or (1 if job.on_gpus else job.devices))}
    if not job.on_gpus:
        return {"requests": cores}
    return {"requests": cores, "limits": {_vendor(job): str(job.devices)}}


def _vendor(job: LaunchJob) -> str:
    return "amd.com/gpu" if job.device.startswith("MI") else "nvidia.com/gpu"
