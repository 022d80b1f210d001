"""A job as data: what is trained, on how many nodes, and the scheduler's options. Writes nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.facts.config import file as configfile
from shoal.facts.config.file import Loaded
from shoal.facts.config.paths import with_absolute_paths
from shoal.facts.problem import BadInput, Problem
from shoal.launch.nodes.count import NodeCount
from shoal.plan.importers.sources import read_table
from shoal.plan.resolve import Job, resolve
from shoal.train.run_directory import JOB

# Files in the run directory's job folder that a scheduler's scripts read and write.
CONFIG, EXIT, CANCELLED = "config.toml", "exit", "cancelled"
# Flags that only some targets understand: silently ignoring one would break a promise.
ONLY_FOR = {
    "time": ("slurm", "kubernetes", "sagemaker"),
    "warning": ("slurm", "kubernetes"),
    "restarts": ("slurm", "ray", "kubernetes", "sagemaker"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "exclude": ("slurm", "ray", "kubernetes"),
    "cpus": ("slurm", "ray", "kubernetes"),
    "image": ("slurm", "kubernetes", "sagemaker"),
    "mount": ("slurm",),
    "option": ("slurm",),
    "address": ("ray",),
    "namespace": ("kubernetes",),
    "claim": ("kubernetes",),
    "queue": ("kubernetes",),
    "pod": ("kubernetes",),
    "role": ("sagemaker",),
    "bucket": ("sagemaker",),
}
# Accepted time limits: 90 (minutes), 4:00:00, 2-00:00:00, as in Slurm.
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")


class LaunchJob(BaseModel):
    """What a target writes its files from. A target refuses fields that it does not support (``ONLY_FOR``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    name: str
    run: Path
    config: str  # the complete config as TOML, so that a restart next week reads what was submitted
    layout: str
    nodes: str = "1"  # as in ``--nodes``: 2, or 1:2
    devices: int = Field(1, ge=1)  # ranks per node
    device: str = "cpu"
    whole_nodes: bool = (
        False  # all devices of each node and no number of cores: then we get the rest of the node too
    )
    # The command that trains; a container has its own.
    program: tuple[str, ...] = (sys.executable, "-m", "shoal")
    working_directory: Path = Path()
    time_limit: int | None = Field(None, ge=60)  # seconds
    warning: int = Field(120, ge=1)  # seconds before the limit, for the step, the commit and the shutdown
    restarts: int = Field(1000, ge=0)  # how often it restarts after a stop, a limit or a lost node
    interface: str | None = None
    partition: str | None = None
    account: str | None = None
    exclude: str | None = None  # comma-separated nodes, as the engine names them
    cpus: int | None = Field(None, ge=1)  # per node
    image: str | None = None
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # further options of the scheduler, in its own syntax
    address: str | None = None
    namespace: str = "default"
    claim: str = "shared"
    queue: str | None = None  # Kueue's queue
    pod: dict[str, Any] | None = None  # a template merged into that of our pods
    role: str | None = None
    bucket: str | None = None

    @property
    def count(self) -> NodeCount:
        return NodeCount.parse(self.nodes)

    @property
    def world(self) -> int:
        return self.count.most * self.devices

    @property
    def on_gpus(self) -> bool:
        return self.device != "cpu"

    @property
    def folder(self) -> Path:
        return self.run / JOB

    def train(self, config: str, run: str) -> list[str]:
        """The command of a node's launcher, without the node's name."""
        return [*self.program, "train", config, "--run", run, "--nodes", self.nodes]


def compose(
    given: Loaded,
    target: str,
    run: Path | None,
    nodes: str | None,
    flags: dict[str, Any],
    visible: str | None = None,
) -> LaunchJob:
    """Build a job, and report all errors that can be found without a scheduler. Spawns and writes nothing.

    ``visible``: the value of CUDA_VISIBLE_DEVICES, for a job on this machine.
    """
    problems = [
        Problem(f"--{name} says nothing to {target}", f"leave it out; it is for --to {' or '.join(targets)}")
        for name, targets in ONLY_FOR.items()
        if flags.get(name) is not None and target not in targets
    ]
    if problems:
        raise BadInput(problems)
    config = given.config
    if target != "local" and config.cluster.on.strip().lower() == "local":
        raise BadInput(
            "cluster.on = local: that is this machine, and the job's nodes are others",
            "say what they have, nodes x devices: --set cluster.on=2x8xH100",
        )
    count = NodeCount.parse(nodes) if nodes is not None else None
    with given.located():
        job = resolve(config, visible, count.most if count else 1)
    nodes, devices = _placed(job, count)
    if target == "local" and nodes != "1":
        raise BadInput(
            f"--to local is one machine, and layout {job.layout} is on {nodes} nodes",
            "--to slurm, or a layout for one machine; on plain hosts: shoal train --nodes on each",
        )
    if nodes != "1" and config.cluster.interface is None and target != "sagemaker":
        raise BadInput(
            "several nodes and no cluster.interface: ranks would listen on loopback, which other nodes cannot reach",
            "name the interface that joins them: --set cluster.interface=eth0",
        )
    settled = with_absolute_paths(config).model_copy(update={"layout": str(job.layout)})
    path = run or Path(config.run.dir).expanduser() / config.run.slug
    image = flags.get("image")
    container = {"program": ("shoal",)} if image or target in ("kubernetes", "sagemaker") else {}
    limit = flags.get("time")
    values = dict(
        target=target,
        name=config.run.slug,
        run=path.absolute(),
        config=configfile.write(settled),
        layout=str(job.layout),
        nodes=nodes,
        devices=devices,
        device=job.cluster.device.name,
        whole_nodes=job.cluster.device.name != "cpu"
        and devices == job.cluster.devices_per_node
        and flags.get("cpus") is None,
        working_directory=Path.cwd(),
        interface=config.cluster.interface,
        time_limit=seconds_of(limit) if limit else None,
        mounts=tuple(flags.get("mount") or ()),
        options=tuple(flags.get("option") or ()),
        pod=_template(flags["pod"]) if flags.get("pod") is not None else None,
        **{name: flags[name] for name in _PLAIN if flags.get(name) is not None},
        **container,
    )
    try:
        return LaunchJob.model_validate(values)
    except ValidationError as error:
        raise BadInput(
            [
                Problem(f"--{one['loc'][0]} {one['input']}: {one['msg']}", "shoal launch --help")
                for one in error.errors()
            ]
        ) from None


def _template(path: Path) -> dict[str, Any]:
    try:
        return read_table(path)
    except BadInput as error:
        raise BadInput(f"--pod: {error.problems[0].what}", "a pod template: YAML, or JSON") from None


_PLAIN = (
    *("warning", "restarts", "partition", "account", "exclude", "cpus", "image"),
    *("address", "namespace", "claim", "queue", "role", "bucket"),
)


def _placed(job: Job, count: NodeCount | None) -> tuple[str, int]:
    """The number of nodes, and of ranks on each: equally many on all."""
    from shoal.launch.nodes.train import check_even

    world = job.layout.world
    if count is None:
        each = min(world, job.cluster.devices_per_node)
        count = NodeCount(-(-world // each), -(-world // each))
    if count.most > 1:
        check_even(job, count)
    each = world // count.most
    if (
        job.cluster.device.name != "cpu"
        and each > job.cluster.devices_per_node
        and not job.config.cluster.share
    ):
        raise BadInput(
            f"--nodes {count}: {each} ranks on each, and a node of {job.cluster} has {job.cluster.devices_per_node}",
            f"--nodes {-(-world // job.cluster.devices_per_node)}",
        )
    return str(count), each


def seconds_of(text: str) -> int:
    """Seconds of a time limit in Slurm's syntax: minutes, minutes:seconds, hours:minutes:seconds, with optional
    days- in front.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise BadInput(
            f"--time {text}: not a time limit", "--time 4:00:00, --time 2-00:00:00, or minutes: --time 90"
        )
    days, first, second, third = (int(part) if part else None for part in found.groups())
    assert first is not None
    if days is not None:  # days-hours[:minutes[:seconds]]
        total = days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        total = first * 3600 + (second or 0) * 60 + third
    else:
        total = first * 60 + (second or 0)
    if total < 60:
        raise BadInput(f"--time {text}: less than a minute", "--time 4:00:00")
    return total
