"""A node's report: versions, devices, limits, and the findings of ``shoal doctor``."""

from __future__ import annotations

import os
import platform
import resource
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import GIB
from shoal.facts.cluster.this_machine import look, nvidia_smi, usable_threads
from shoal.launch import doctor

UNLIMITED = 2**62


@dataclass(frozen=True)
class NodeReport:
    """Plain values, because they travel as JSON."""

    name: str
    host: str
    address: str  # where other nodes reach it
    port: int  # the port it listens on while the inspection runs
    device: str
    devices: int
    memory: float  # GiB per device
    host_memory: float  # GiB
    cores: int
    versions: dict[str, str]
    limits: dict[str, int]
    checks: list[dict[str, str]] = field(default_factory=list)  # problems of this node alone
    load: float = 0.0  # load average of the last minute


def report(name: str, address: str, port: int, run: Path, visible: str | None) -> tuple[NodeReport, Cluster]:
    """This machine's report, and its catalogue entry. Takes seconds: torch is queried in a separate process."""
    here = look(visible)
    answers = doctor.ask_torch()
    checks = doctor.examine(run, visible, here, answers)
    found = NodeReport(
        name=name,
        host=socket.gethostname(),
        address=address,
        port=port,
        device=here.device.name,
        devices=here.devices if here.device.name != "cpu" else 0,
        memory=round(here.device.memory_bytes / GIB, 1) if here.device.name != "cpu" else 0.0,
        host_memory=round((here.host_memory or 0) / GIB, 1),
        cores=usable_threads(),
        versions=_versions(answers),
        limits=_limits(),
        checks=[asdict(check) for check in checks if check.status != "ok"],
        load=round(os.getloadavg()[0], 1),
    )
    return found, here


def _versions(answers: dict[str, Any]) -> dict[str, str]:
    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    found = {
        "Shoal": __version__,
        "torch": answers.get("version", ""),
        "CUDA": answers.get("cuda", ""),
        "NCCL": answers.get("nccl", ""),
        "Python": platform.python_version(),
        "driver": driver[0] if driver else "",
        "kernel": platform.release(),
    }
    return {name: version for name, version in found.items() if version}


def _limits() -> dict[str, int]:
    kinds = {
        "open files": resource.RLIMIT_NOFILE,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: UNLIMITED if limit < 0 else limit for name, limit in soft.items()}
