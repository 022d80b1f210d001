"""Circumstances of a measurement: versions, power limit, clock."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

import torch

from shoal import __version__
from shoal.facts.cluster.this_machine import nvidia_smi
from shoal.launch.manifest import git_commit

QUERY = ("driver_version", "power.limit", "clocks.sm")


class Driver(NamedTuple):
    """nvidia-smi's report on the first device in use; empty if there is none."""

    version: str = ""
    power_limit: float | None = None  # watts
    clock: float | None = None  # MHz, current


def driver(device: torch.device) -> Driver:
    if device.type != "cuda":
        return Driver()
    which = [f"--id={uuid}"] if (uuid := _uuid(device)) else []
    return parse(nvidia_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", *which))


def _uuid(device: torch.device) -> str:
    found = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return found if found.startswith("GPU-") or not found else f"GPU-{found}"


def parse(text: str) -> Driver:
    """Parse one line, in which single cells may be [N/A]."""
    cells = [cell.strip() for cell in (text.splitlines() or [""])[0].split(",")]
    version, power, clock, *_ = (*cells, "", "", "")
    return Driver(version, _number(power), _number(clock))


def _number(cell: str) -> float | None:
    try:
        return float(cell) or None
    except ValueError:
        return None


def versions(device: torch.device, driver_version: str) -> dict[str, str]:
    found = {
        "shoal": __version__,
        "commit": git_commit(Path(__file__).parent, digits=12) or "",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": (torch.version.cuda or "") if device.type == "cuda" else "",
        "driver": driver_version,
    }
    return {name: version for name, version in found.items() if version}
