"""The load of the leading launcher's machine: cores, memory, GPUs. From the kernel and from the driver."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

CORES, MEMORY = Path("/proc/stat"), Path("/proc/meminfo")
# Querying the driver takes tens of milliseconds of a core.
GPU_SECONDS, GPU_PATIENCE = 5.0, 5.0
QUESTION = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class Machine:
    """The load between two looks."""

    def __init__(self) -> None:
        self._before = _core_time()
        self._smi = shutil.which("nvidia-smi")
        self._gpus: dict[str, float] = {}
        self._asked = 0.0

    def look(self) -> dict[str, float]:
        """Metrics under ``system/``, without those that this machine does not provide."""
        found = {**_memory(), **self._cores(), **self._of_gpus()}
        return {f"system/{name}": value for name, value in found.items()}

    def _cores(self) -> dict[str, float]:
        before, now = self._before, _core_time()
        total = now[1] - before[1]
        if total <= 0:  # the kernel counts in hundredths of a second
            return {}
        self._before = now
        return {"cpu_percent": 100.0 * (now[0] - before[0]) / total}

    def _of_gpus(self) -> dict[str, float]:
        if self._smi is None or (self._asked and time.monotonic() - self._asked < GPU_SECONDS):
            return self._gpus
        self._asked = time.monotonic()
        try:
            told = subprocess.run(
                [self._smi, *QUESTION], capture_output=True, text=True, timeout=GPU_PATIENCE, check=True
            )
            self._gpus = read_gpus(told.stdout)
        except (OSError, subprocess.SubprocessError):
            self._gpus = {}
        return self._gpus


def read_gpus(told: str) -> dict[str, float]:
    """Parse a GPU's line: index, percentage of time in which a kernel ran, MiB. Unknown values are ``[N/A]``."""
    found: dict[str, float] = {}
    for line in told.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdecimal():
            with suppress(ValueError):
                found[f"gpu{cells[0]}_percent"] = float(cells[1])
            with suppress(ValueError):
                found[f"gpu{cells[0]}_memory"] = float(cells[2]) * 2**20
    return found


def _core_time() -> tuple[float, float]:
    """Summed over all cores: busy time, and total time."""
    with suppress(OSError, ValueError, IndexError):
        words = CORES.read_text(encoding="ascii").splitlines()[0].split()
        counts = [int(word) for word in words[1:9]]  # guests are included in users
        return float(sum(counts) - counts[3] - counts[4]), float(sum(counts))
    return 0.0, 0.0


def _memory() -> dict[str, float]:
    """Memory in bytes that is not available to others."""
    with suppress(OSError, ValueError, KeyError):
        rows = (line.split(":") for line in MEMORY.read_text(encoding="ascii").splitlines())
        sizes = {name: int(rest.split()[0]) for name, rest in rows}
        return {"memory_used": 1024.0 * (sizes["MemTotal"] - sizes["MemAvailable"])}
    return {}
