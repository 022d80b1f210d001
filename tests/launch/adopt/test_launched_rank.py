"""What the variables of other launchers say, and what is refused."""

from __future__ import annotations

import pytest

from shoal.facts.problem import BadInput
from shoal.launch.adopt.launched_rank import (
    POD,
    SRUN,
    LaunchedRank,
    check_order,
    first_node,
    parse_meet,
    slurm_nodes,
    told,
)
from shoal.launch.nodes.meet import Meet

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


def test_each_launcher_is_understood() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    found = told({**torchrun, **place})
    assert found == LaunchedRank(3, 4, 1, 2, "torchrun", "n1", 29500) and (found.nodes, found.node) == (2, 1)
    # Without MASTER_ADDR the ranks of one node meet on loopback, all at the same port.
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    mpi = dict(zip((f"OMPI_COMM_WORLD_{name}" for name in names), ("1", "2", "1", "2"), strict=True))
    alone = told({**mpi, "PMIX_NAMESPACE": "x"})
    assert alone is not None and alone[:4] == (1, 2, 1, 2) and alone.host == "127.0.0.1"
    assert alone.port == told({**mpi, "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "x"}).port  # type: ignore[union-attr]
    # mpirun inside of a Slurm job: its own words count.
    assert told({**mpi, **STEP, "SLURM_NTASKS": "8"}).by == "mpirun"  # type: ignore[union-attr]
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert told(hydra)[:4] == (0, 2, 0, 2)  # type: ignore[index]
    assert told({"PATH": "/bin"}) is None
    assert told({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) is None


def test_slurm_has_ranks_or_nodes() -> None:
    tasks = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    found = told({**STEP, **tasks, "SLURM_STEP_NODELIST": "gpu[003-004],x1"})
    assert found is not None and found[:5] == (5, 8, 1, 4, SRUN) and found.host == "gpu003"
    assert not found.per_node and found.nodes == 2
    each = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a,b"}
    each |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    node = told(each)
    assert node is not None and node.per_node and (node.world, node.rank, node.host) == (2, 1, "a")
    assert Meet.of(None, node) == Meet("a", node.port, False, True)
    # The batch script itself is no task, and a step of one is nothing special.
    assert told({**STEP, "SLURM_NTASKS": "1"}) is None
    assert told({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) is None
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "MASTER_PORT": "29500"}
    assert told(pod) == LaunchedRank(1, 2, 0, 1, POD, "job-0", 29500, True)


@pytest.mark.parametrize(
    ("text", "first"), [("n[1-4,7]", "n1"), ("gpu-[08,11]", "gpu-08"), ("a,b", "a"), ("r[2-3]-ib", "r2-ib")]
)
def test_the_first_host_of_a_list(text: str, first: str) -> None:
    assert first_node({"SLURM_JOB_NODELIST": text}) == first


def test_every_host_of_a_list() -> None:
    text = "gpu[08-10,3]-ib,x1,r[1-2]n[5,7]"
    racks = ["r1n5", "r1n7", "r2n5", "r2n7"]
    found = [*slurm_nodes({"SLURM_STEP_NODELIST": text, "SLURM_JOB_NODELIST": "other"})]
    assert found == ["gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu3-ib", "x1", *racks]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            "names no rank: RANK=4",
        ),
        (
            {"RANK": "x", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            "names no rank: RANK=x",
        ),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "how many are on this node"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "which rank of its node"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "4,2"},
            "not as many on each",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "nothing says where they meet",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "many"},
            "MASTER_PORT=many: not a port",
        ),
    ],
)
def test_what_names_no_rank_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        told(environment)


def test_ranks_are_in_the_order_of_nodes() -> None:
    check_order(LaunchedRank(3, 4, 1, 2))
    with pytest.raises(BadInput, match="in the order of nodes"):
        check_order(LaunchedRank(2, 4, 1, 2))


@pytest.mark.parametrize("text", ["node1", "node1:", ":29500", "node1:0", "node1:99999", "no de:1"])
def test_a_place_to_meet_is_a_host_and_a_port(text: str) -> None:
    assert parse_meet("node1:29500") == ("node1", 29500)
    with pytest.raises(BadInput, match="not a host and a port"):
        parse_meet(text)
