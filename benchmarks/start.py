"""How long a command that needs no torch takes, from a cold process to its exit."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from record import record

REPEATS = 11
COMMANDS = (["--help"], ["config", "show"], ["train", "--layout", "tpp=2"])


def main() -> None:
    shoal = Path(sys.executable).with_name("shoal")
    seconds = {}
    for arguments in COMMANDS:
        taken = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            subprocess.run([shoal, *arguments], capture_output=True)
            taken.append(time.perf_counter() - start)
        seconds[" ".join(arguments)] = {"median": statistics.median(taken), "worst": max(taken)}
    record("start", repeats=REPEATS, seconds=seconds)


if __name__ == "__main__":
    main()
