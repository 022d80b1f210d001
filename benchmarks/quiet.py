"""Ranks that share one GPU are quiet: no warning of torch's in what a command prints or logs.

``python benchmarks/quiet.py [LAYOUT ...]`` runs ``shoal parity`` over the layouts, then ``shoal train`` in each of
them, and exits with 1 where one fails or a line of its output, or of a rank's log, holds a warning.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from record import record

LAYOUTS = (
    "dp=2",
    "tp=2",
    "pp=2",
    "pp=2,schedule=zbv",
    "pp=3,schedule=interleaved",
    "pp=4,schedule=interleaved",
)
# Python's categories, and how torch's C++ begins a line of its log: [W1116 20:00:25 or [rank0]:[W1116.
WARNING = re.compile(r"\b\w*Warning\b|\bWARNING\b|\[W\d{3,4} ")


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if WARNING.search(line)]


def commands(layouts: list[str], folder: Path) -> Iterator[tuple[str, list[str]]]:
    # Divisible into three and four stages, and small enough for a minute each.
    settings = [
        "cluster.share=true",
        "fault.timeout=60",
        "recipe.seq=64",
        "recipe.batch=24",
        "recipe.steps=6",
    ]
    changed = [word for setting in settings for word in ("--set", setting)]
    yield "parity", ["parity", "--layouts", ";".join(layouts), *changed]
    for number, layout in enumerate(layouts):
        yield f"train {layout}", ["train", "--layout", layout, "--run", str(folder / str(number)), *changed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument(
        "--set", action="append", default=[], help="one more setting, such as cluster.on=4xcpu"
    )
    asked = parser.parse_args()
    loud = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, words in commands(list(asked.layouts), folder):
            more = [word for setting in asked.set for word in ("--set", setting)]
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "shoal", *words, *more], capture_output=True, text=True, check=False
            )
            said = warnings_in(done.stdout) + warnings_in(done.stderr)
            for log in folder.glob("*/logs/rank-*.log"):
                said += [f"{log.name}: {line}" for line in warnings_in(log.read_text(errors="replace"))]
                log.unlink()
            fine = done.returncode == 0 and not said
            loud |= not fine
            record(
                "quiet",
                command=title,
                exit_code=done.returncode,
                warnings=len(said),
                first=said[:3],
                seconds=round(time.perf_counter() - began, 1),
            )
            if done.returncode != 0:
                print(done.stderr[-3000:], file=sys.stderr)
    sys.exit(1 if loud else 0)


if __name__ == "__main__":
    main()
