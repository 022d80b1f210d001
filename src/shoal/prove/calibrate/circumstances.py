"""Circumstances of a measurement: versions, power limit, clock."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from shoal import __version__

PATIENCE = 20.0
QUERY = ("driver_version", "power.limit", "clocks.sm")


class Driver(NamedTuple):
    """What nvidia-smi says of the first device in use; nothing where there is none."""

    version: str = ""
    power_limit: float | None = None  # watts
    clock: float | None = None  # MHz, now


def driver(device: torch.device) -> Driver:
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return Driver()
    which = [f"--id={uuid}"] if (uuid := _uuid(device)) else []
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", *which],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Driver()
    return parse(answer.stdout) if answer.returncode == 0 else Driver()


def _uuid(device: torch.device) -> str:
    found = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return found if found.startswith("GPU-") or not found else f"GPU-{found}"


def parse(text: str) -> Driver:
    """One line, of which single cells may say [N/A]."""
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
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": (torch.version.cuda or "") if device.type == "cuda" else "",
        "driver": driver_version,
    }
    return {name: version for name, version in found.items() if version}


def _commit() -> str:
    """Where Shoal runs out of its repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        here = Path(__file__).parent
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=here, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
