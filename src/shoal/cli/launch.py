"""``shoal launch``: a job for the engine that a cluster has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from shoal.launch.jobs.job import LaunchJob
    from shoal.launch.jobs.record import JobRecord


def launch(
    config: Path | None = None,
    /,
    *,
    to: str,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    submit: Annotated[bool, Parameter(negative=())] = False,
    follow: bool = True,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    layout: str | None = None,
    run: Path | None = None,
    nodes: str | None = None,
    time: str | None = None,
    warning: int | None = None,
    restarts: int | None = None,
    partition: str | None = None,
    account: str | None = None,
    exclude: str | None = None,
    cpus: int | None = None,
    image: str | None = None,
    mount: Annotated[list[str] | None, Parameter(negative=())] = None,
    option: Annotated[list[str] | None, Parameter(negative=(), allow_leading_hyphen=True)] = None,
    address: str | None = None,
    namespace: str | None = None,
    claim: str | None = None,
    queue: str | None = None,
    pod: Path | None = None,
    role: str | None = None,
    bucket: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a run as a job for Slurm, Ray, Kubernetes or SageMaker, or for the background of this machine; submit
    it.

    Example: shoal launch my-run.toml --to slurm --set cluster.on=2x8xH100 --set cluster.interface=ib0 --submit

    The files go into the folder job of the run directory; --dry-run prints them and writes nothing. --submit checks
    that the engine takes the job (sbatch --test-only), submits it and follows it; Ctrl-C stops following, not the job.
    A job that was stopped or lost a node starts again and continues: docs/clusters.md.

    Parameters
    ----------
    config
        A TOML file, as for shoal train.
    to
        local, slurm, ray, kubernetes or sagemaker.
    dry_run
        Print the job; write and submit nothing.
    submit
        Send it.
    follow
        With --submit: print what the job prints until it is over; --no-follow returns at once.
    set
        Override one value, as in recipe.lr=0.001. May be given several times.
    layout
        The parallel layout, as in fsdp=16, or auto.
    run
        The run directory; all nodes must see it. By default [run] dir and name.
    nodes
        How many nodes: a number, or minimum:maximum, to continue with fewer. By default what cluster.on says.
    time
        The time limit: 4:00:00, 2-00:00:00, or minutes.
    warning
        How many seconds before the limit the run finishes its step and commits. Default 120.
    restarts
        How many times the job may restart. Default 1000.
    partition
        Slurm's partition.
    account
        Slurm's account.
    exclude
        Nodes to leave out, separated by commas: those that shoal doctor --cluster names.
    cpus
        Cores per node.
    image
        A container image: for Slurm with pyxis, Kubernetes and SageMaker.
    mount
        With --image, on Slurm: HOST:CONTAINER, beside the run directory. May be given several times.
    option
        Another option of sbatch, as in --option=--reservation=may. May be given several times.
    address
        Where Ray's head is: HOST:PORT; by default what RAY_ADDRESS says, or the Ray of this machine.
    namespace
        Kubernetes' namespace. Default default.
    claim
        The volume claim, ReadWriteMany, that holds run directories on Kubernetes. Default shared.
    queue
        Kueue's local queue: all pods are admitted at once, or none.
    pod
        A pod template (YAML, JSON) to merge into Kubernetes' pods: secrets, tolerations, a service account.
    role
        SageMaker's execution role, an ARN.
    bucket
        Where SageMaker keeps the job's output: s3://BUCKET/PREFIX.
    json
        Print one JSON document.
    """
    from shoal.cli.show import print_json
    from shoal.facts.config.file import load
    from shoal.facts.problem import BadInput
    from shoal.launch.jobs.job import compose
    from shoal.launch.jobs.submit import submit_job, write_job
    from shoal.launch.jobs.targets import find_target

    flags: dict[str, Any] = {
        "time": time, "warning": warning, "restarts": restarts, "partition": partition, "account": account,
        "exclude": exclude, "cpus": cpus, "image": image, "mount": mount, "option": option, "address": address,
        "namespace": namespace, "claim": claim, "queue": queue, "pod": pod, "role": role, "bucket": bucket,
    }  # fmt: skip
    if dry_run and submit:
        raise BadInput("--dry-run and --submit: only one of them", "leave out the other")
    target = find_target(to)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if to == "local" else None
    job = compose(load(config, set, layout), to, run, nodes, flags, visible)
    document = _describe(job) | {"command": target.by_hand(job), "submitted": False}
    if submit:
        record, said = submit_job(job)
        print(f"{said}\nsubmitted: {to} {record.id}", file=sys.stderr)
        document |= {"submitted": True, "id": record.id}
        code = _followed(record, document) if follow else 0
    else:
        files = target.write(job) if dry_run else write_job(job)
        document |= {
            "files": {name: text if dry_run else str(job.folder / name) for name, text in files.items()}
        }
        code = 0
    if json:
        print_json(document)
    elif dry_run:
        print("\n".join(f"# {job.folder / name}\n{text}" for name, text in files.items()))
    elif not submit:
        written = ", ".join(str(job.folder / name) for name in files)
        print(f"wrote {written}\nnext: the same command with --submit, or by hand: {target.by_hand(job)}")
    return code


def _describe(job: LaunchJob) -> dict[str, Any]:
    return {
        "target": job.target,
        "name": job.name,
        "run": str(job.run),
        "layout": job.layout,
        "nodes": job.nodes,
        "devices_per_node": job.devices,
        "device": job.device,
    }


def _followed(record: JobRecord, document: dict[str, Any]) -> int:
    """Follow until the job is over, or the user interrupts; returns the job's exit code."""
    from shoal.launch.jobs.follow import follow
    from shoal.launch.jobs.targets import find_target
    from shoal.launch.report import FAILED

    target = find_target(record.job.target)
    try:
        found = follow(
            target.log_file(record),
            lambda: target.status(record),
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print(f"no longer following; the job goes on: shoal status {record.run}", file=sys.stderr)
        return 0
    document |= {"state": found.state, "exit_code": found.exit_code}
    if found.exit_code is not None:
        return found.exit_code
    return 0 if found.state == "finished" else FAILED
