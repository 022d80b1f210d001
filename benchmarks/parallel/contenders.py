"""Who is compared with whom, and how one of them is run: two fresh processes of one thread each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

HERE = Path(__file__).parent
RANKS = 2
SECONDS = 900  # for one run; DeepSpeed's first one builds for minutes


@dataclass(frozen=True)
class Contender:
    """A program and the environment that it runs in: Shoal's, or one of the peers'."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None

    @property
    def is_shoal(self) -> bool:
        return self.script == "shoal_side.py"

    def python(self, environments: Path) -> str:
        return (
            sys.executable
            if self.environment is None
            else str(environments / self.environment / "bin/python")
        )


@dataclass(frozen=True)
class Family:
    """One strategy: Shoal's layout and those it is compared with."""

    shoal: Contender
    peers: tuple[Contender, ...]


class Failed(Exception):
    """A contender did not run to its end."""


def shoal(layout: str) -> Contender:
    return Contender(f"shoal {layout}", "shoal_side.py", (layout,))


def plain(name: str, script: str) -> Contender:
    return Contender(f"plain {name}", f"peers/{script}")


def deepspeed(stage: int) -> Contender:
    return Contender(
        f"deepspeed zero={stage}", "peers/deepspeed_zero.py", ("--stage", str(stage)), "deepspeed"
    )


FAMILIES = {
    "dp": Family(
        shoal("dp=2"),
        (
            plain("DDP", "plain_ddp.py"),
            Contender("accelerate DDP", "peers/accelerate_ddp.py", environment="accelerate"),
        ),
    ),
    "fsdp": Family(shoal("fsdp=2"), (plain("fully_shard", "plain_fsdp.py"), deepspeed(3))),
    "zero1": Family(shoal("fsdp=2,zero=1"), (deepspeed(1),)),
    "zero2": Family(shoal("fsdp=2,zero=2"), (deepspeed(2),)),
    "tp": Family(shoal("tp=2"), (plain("parallelize_module", "plain_tp.py"),)),
    "pp": Family(shoal("pp=2,schedule=1f1b"), (plain("Schedule1F1B", "plain_pp.py"),)),
}

REFERENCE = plain("loop in one process", "plain_ddp.py")


def run(
    contender: Contender, environments: Path, arguments: tuple[str, ...], ranks: int = RANKS
) -> dict[str, Any]:
    """What the contender's first rank reports: step_s, losses, versions."""
    python = contender.python(environments)
    if not Path(python).exists():
        raise Failed(f"no environment {contender.environment}: see README.md")
    command = [python, str(HERE / contender.script), *contender.arguments, *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryFile() as output, TemporaryFile() as errors:
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | rank_environment(rank, ranks, port),
                stdout=output if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(ranks)
        ]
        try:
            wait(processes)
        except Failed as failure:
            raise Failed(f"{failure}: {error_line(errors)}") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads(last_line(output))


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would say; the same for every contender."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
    }


def wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well; one that fails leaves the others waiting for it, so it is looked for."""
    deadline = time.monotonic() + SECONDS
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > deadline:
            raise Failed(f"not done after {SECONDS} s")
        time.sleep(0.2)
    codes = [process.poll() for process in processes]
    if any(codes):
        raise Failed(f"exit codes {codes}")


def error_line(file: IO[bytes]) -> str:
    """The last line that names an error, else the last one."""
    file.seek(0)
    lines = [line for line in file.read().decode(errors="replace").split("\n") if line.strip()]
    named = [line for line in lines if "Error" in line or "BadInput" in line or "fix:" in line]
    return (named or lines or ["nothing printed"])[-1]


def last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "nothing printed")
