"""``shoal train`` with a guest in every rank that spills every secret it can get hold of, in every way, and crashes.

``python -m tests.launch.leaking WORDS``: as ``shoal WORDS``.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from shoal.cli.main import main
from shoal.launch import local
from shoal.launch.assignment import Assignment
from shoal.launch.worker import work
from shoal.train.loop import Training
from shoal.train.outcome import Outcome

# The path of a file with a secret that only the launcher's environment has.
STOLEN = "SHOAL_TEST_STOLEN"
CRASHES_IN = 4


def leak(assignment: Assignment) -> Outcome | None:
    return work(assignment, Leak(int(os.environ["RANK"])))


class Leak:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def meet(self, training: Training) -> None:
        pass

    def enter(self, phase: str, step: int) -> None:
        if self.rank != 1 or step < CRASHES_IN:
            return
        stolen = Path(os.environ[STOLEN]).read_text()
        all_there_is = f"{dict(os.environ)} {stolen}"
        print(all_there_is)
        print("the last words", file=sys.stderr)
        # Past Python's streams.
        os.write(1, os.environ["MY_API_KEY"].encode() + b"\n")
        os.write(2, f"what(): {stolen}\n".encode())
        subprocess.run(
            [sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", all_there_is], check=True
        )
        try:
            raise ValueError(os.environ["DATABASE_URL"])
        except ValueError as error:
            raise RuntimeError(f"cannot log in with {os.environ['MY_API_KEY']}, {stolen}") from error


if __name__ == "__main__":
    local.train = functools.partial(local.train, entrypoint="tests.launch.leaking:leak")
    main(sys.argv[1:])
