"""Read from the environment what another launcher (torchrun, mpirun, srun, a pod) says about this process. Needs no
torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from zlib import crc32

from shoal.facts.problem import BadInput
from shoal.launch.interfaces import LOOPBACK

Environment = Mapping[str, str]

TORCHRUN, MPIRUN, SRUN, POD = "torchrun", "mpirun", "srun", "the environment"

# Variables for rank, world size, rank on this node, and ranks on this node.
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

# Without a given port, one is derived from the job's name, outside the ranges that systems assign themselves.
FIRST_PORT, PORTS = 20000, 12000


class LaunchedRank(NamedTuple):
    """What a launcher says about a process, and where ranks connect."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    by: str = TORCHRUN
    host: str = ""
    port: int = 0
    per_node: bool = False  # one process per node was started, however many devices it has

    @property
    def nodes(self) -> int:
        return max(1, self.world // self.local_world)

    @property
    def node(self) -> int:
        """The index of this node."""
        return self.rank // self.local_world


def torchrun_rank(environment: Environment = os.environ) -> LaunchedRank | None:
    """torchrun's variables, with a place to connect; None if this process is not one of its ranks."""
    if not {*TORCH, "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    return _ranks(environment, TORCH, TORCHRUN, *_master(environment))


def told(environment: Environment = os.environ, meet: tuple[str, int] | None = None) -> LaunchedRank | None:
    """Variables of any known launcher; None if this process was started on its own.

    ``meet``: where the user says that ranks connect. Otherwise MASTER_ADDR and MASTER_PORT, the first node of Slurm's
    list or, on a single node, loopback.
    """
    found = _told(environment)
    if found is None:
        return None
    host, port = meet or _place(found, environment)
    return found._replace(host=host, port=port)


def _told(environment: Environment) -> LaunchedRank | None:
    there = environment.keys()
    if {*TORCH[:3]} <= there and (environment["WORLD_SIZE"] != "1" or "TORCHELASTIC_RUN_ID" in there):
        return _ranks(_with_local_world(environment), TORCH, TORCHRUN)
    for names in (OPEN_MPI, HYDRA):
        if {*names} <= there and environment[names[1]] != "1":
            return _per_node(_ranks(environment, names, MPIRUN))
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= there and environment["WORLD_SIZE"] != "1":
        alone = {**environment, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return _per_node(_ranks(alone, TORCH, POD))
    if (found := _slurm(environment)) is not None:
        return found
    if {"PMI_RANK", "PMI_SIZE"} <= there and environment["PMI_SIZE"] != "1":
        raise BadInput(
            f"PMI_RANK={environment['PMI_RANK']} of {environment['PMI_SIZE']}, and nothing says which rank of its "
            "node this is",
            "export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; or start it with torchrun, mpirun or srun",
        )
    return None


def _with_local_world(environment: Environment) -> Environment:
    """Add LOCAL_WORLD_SIZE, which scripts that translate variables for torch often omit."""
    if "LOCAL_WORLD_SIZE" in environment:
        return environment
    for name in ("LOCAL_SIZE", OPEN_MPI[3], HYDRA[3]):
        if name in environment:
            return {**environment, "LOCAL_WORLD_SIZE": environment[name]}
    if tasks := _tasks(environment):
        return {**environment, "LOCAL_WORLD_SIZE": str(tasks)}
    raise BadInput(
        f"RANK={environment['RANK']} of {environment['WORLD_SIZE']}, and nothing says how many are on this node",
        "export LOCAL_WORLD_SIZE",
    )


def _slurm(environment: Environment) -> LaunchedRank | None:
    """A task of ``srun``. In the batch script itself there is no step, and no task."""
    if not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID"} <= environment.keys():
        return None
    world = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if world == "1":
        return None
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    told = {**environment, names[1]: world, names[3]: str(_tasks(environment) or world)}
    return _per_node(_ranks(told, names, SRUN))


def _tasks(environment: Environment) -> int | None:
    """Slurm's tasks per node: ``4(x2)``, ``4``. Unequal numbers, ``4,2``, are refused."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE")
    if not text:
        return None
    counts = {match[0] for match in re.findall(r"(\d{1,6})(\(x\d+\))?(?:,|$)", text)}
    if len(counts) != 1:
        raise BadInput(
            f"srun started {text} tasks on its nodes, which are not as many on each",
            "srun --ntasks-per-node=8",
        )
    return int(counts.pop())


def _per_node(found: LaunchedRank) -> LaunchedRank:
    return found._replace(per_node=found.local_world == 1 and found.world > 1)


def _ranks(
    environment: Environment, names: tuple[str, ...], by: str, host: str = "", port: int = 0
) -> LaunchedRank:
    words = {name: environment[name] for name in names}
    wrong = [f"{name}={word}" for name, word in words.items() if not (word.isdecimal() and len(word) < 9)]
    numbers = [0, 0, 0, 0] if wrong else [int(word) for word in words.values()]
    rank, world, local_rank, local_world = numbers
    found = None if wrong else LaunchedRank(rank, world, local_rank, local_world, by, host, port)
    if found is None or not (
        found.rank < found.world and found.local_rank < found.local_world <= found.world
    ):
        said = wrong or [f"{name}={word}" for name, word in words.items()]
        unset = " and ".join(names[:2])
        raise BadInput(f"the environment names no rank: {' '.join(said)[:200]}", f"unset {unset}")
    return found


def check_order(found: LaunchedRank) -> None:
    """Refuse ranks that are not ordered by node, with equally many on each: groups of neighbours are assumed to
    share a node.
    """
    even = found.world % found.local_world == 0
    if not even or found.rank % found.local_world != found.local_rank:
        raise BadInput(
            f"rank {found.rank} of {found.world} is number {found.local_rank} of {found.local_world} on its node: "
            "ranks have to be in the order of nodes, and as many on each",
            "srun --distribution=block, mpirun --map-by slot, torchrun with the same --nproc-per-node everywhere",
        )


# Where ranks connect.


def parse_meet(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, as in ``--meet``."""
    host, _, port = text.strip().rpartition(":")
    if not re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*", host) or not _is_port(port):
        raise BadInput(f"--meet {text}: not a host and a port", "--meet node1:29500")
    return host.strip("[]"), int(port)


def _place(found: LaunchedRank, environment: Environment) -> tuple[str, int]:
    if "MASTER_ADDR" in environment:
        return _master(environment, _own_port(environment))
    if "SLURM_JOB_ID" in environment and (first := first_node(environment)) is not None:
        return (first if found.nodes > 1 else LOOPBACK), _own_port(environment)
    if found.nodes == 1:
        return LOOPBACK, _own_port(environment)
    raise BadInput(
        f"{found.by} started {found.world} processes on {found.nodes} nodes, and nothing says where they meet",
        "--meet HOST:PORT with the host of the first; or export MASTER_ADDR and MASTER_PORT",
    )


def _master(environment: Environment, port: int | None = None) -> tuple[str, int]:
    text = environment.get("MASTER_PORT", "" if port is None else str(port))
    if not _is_port(text):
        raise BadInput(f"MASTER_PORT={text[:40]}: not a port", "export MASTER_PORT=29500")
    return environment["MASTER_ADDR"], int(text)


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) < 6 and 0 < int(text) < 1 << 16


def _own_port(environment: Environment) -> int:
    """A port that is the same for all processes of a job and differs between jobs: from the job's name, or the
    common ancestor process.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
    job = [environment[name] for name in names if name in environment] or [str(os.getppid())]
    return FIRST_PORT + crc32(".".join(job).encode()) % PORTS


def first_node(environment: Environment) -> str | None:
    """The first host of Slurm's list."""
    return next(slurm_nodes(environment), None)


def slurm_nodes(environment: Environment) -> Iterator[str]:
    """All hosts of Slurm's list: expands ``gpu[003-010,12]-ib,x1``."""
    text = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        yield from _expanded(part)


def _expanded(part: str) -> Iterator[str]:
    match = re.match(r"([^\[]*)\[([0-9,-]+)\](.*)", part)
    if match is None:
        yield part
        return
    for numbers in match[2].split(","):
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{match[1]}{number:0{len(first)}d}{rest}" for rest in _expanded(match[3]))
