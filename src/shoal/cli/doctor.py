"""``shoal doctor``: is this machine, or every node of a job, ready to train?"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from shoal.launch.adopt.launched_rank import LaunchedRank
    from shoal.launch.doctor import Check
    from shoal.launch.inspection.compare import ClusterCheck


def doctor(
    *,
    run: Path = Path("runs"),
    cluster: Annotated[bool, Parameter(negative=())] = False,
    nodes: int | None = None,
    node_rank: int | None = None,
    meet: str | None = None,
    node: str | None = None,
    interface: str | None = None,
    on: str | None = None,
    shared: bool = True,
    wait: float = 120.0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Check whether this machine is ready to train: versions, devices, links, ports, disk, limits.

    Example: shoal doctor

    With --cluster, checks every node of a job, from inside it: inspects each, compares it with the others, and
    measures its links to up to three of them. Names what differs or is slow, and the nodes to leave out of a launch
    (--exclude):

    srun --ntasks-per-node=1 shoal doctor --cluster --run /shared/runs

    Parameters
    ----------
    run
        The directory for runs; its file system is checked.
    cluster
        Check all nodes of the job that this process is one of: under srun, torchrun, mpirun, in a pod; or with
        --nodes, --node-rank and --meet on each.
    nodes
        With --cluster: how many machines run this command, where no launcher says so.
    node_rank
        With --nodes: the number of this one, from 0.
    meet
        With --cluster: HOST:PORT of the first machine, where the others find it.
    node
        With --cluster: this machine's name; by default Slurm's, or its host name.
    interface
        With --cluster: the interface that joins the nodes; by default the one that leads to the first.
    on
        With --cluster: the cluster whose links to expect: a name such as 2x8xH100, or a file. By default
        the catalogue's links of this machine's devices.
    shared
        With --cluster: the nodes must share the directory for runs.
    wait
        With --cluster: seconds to wait for all nodes.
    json
        Print one JSON document.
    """
    if cluster:
        return _cluster(run, nodes, node_rank, meet, node, interface, on, shared, wait, json)
    from shoal.facts.problem import BadInput

    given = {
        "nodes": nodes,
        "node-rank": node_rank,
        "meet": meet,
        "node": node,
        "interface": interface,
        "on": on,
    }
    if extra := [name for name, value in given.items() if value is not None]:
        raise BadInput(f"--{extra[0]} is for several machines", "shoal doctor --cluster")
    from shoal.launch.doctor import examine

    checks = examine(run, os.environ.get("CUDA_VISIBLE_DEVICES"))
    failed = any(check.status == "failed" for check in checks)
    if json:
        from shoal.cli.show import print_json

        print_json({"ready": not failed, "checks": [asdict(check) for check in checks]})
        return int(failed)
    _print(checks, "not ready: see the failed checks above" if failed else "ready to train: try shoal train")
    return int(failed)


def _print(checks: Sequence[Check | ClusterCheck], last: str) -> None:
    from shoal.launch.screen import Console

    console = Console(highlight=False, soft_wrap=True)
    for check in checks:
        console.print(f"{check.status:<8} {check.name}: {check.detail}", markup=False)
        if check.fix and check.status != "ok":
            console.print(f"         fix: {check.fix}", markup=False)
    console.print(last, markup=False)


def _cluster(
    run: Path,
    nodes: int | None,
    node_rank: int | None,
    meet: str | None,
    node: str | None,
    interface: str | None,
    on: str | None,
    shared: bool,
    wait: float,
    json: bool,
) -> int:
    """One process of a job that checks its nodes. The first one reports."""
    from itertools import islice

    from shoal.cli.summary import leave
    from shoal.facts.cluster import notation
    from shoal.launch.adopt.launched_rank import check_order, parse_meet, slurm_nodes, told
    from shoal.launch.interfaces import address_of
    from shoal.launch.nodes.count import node_name

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    place = parse_meet(meet) if meet is not None else None
    found = told(os.environ, place) or _by_hand(nodes, node_rank, place)
    check_order(found)
    catalogue = notation.find(on, visible) if on is not None else None
    address_of(interface)
    named = os.environ.get("SLURMD_NODENAME") if found.by == "srun" else None
    names = dict(enumerate(islice(slurm_nodes(os.environ), found.nodes))) if found.by == "srun" else {}
    # torch would print a page for every lost connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import DistStoreError

    from shoal.launch.inspection.compare import outliers
    from shoal.launch.inspection.visit import Visit, inspect

    name = node_name(node or named)
    try:
        checks = inspect(Visit(found, name, names, run, interface, shared, wait, visible, catalogue))
    except DistStoreError:
        print(f"error: the first node fell silent, says {name}\n  fix: its own output", file=sys.stderr)
        leave(1)
    if isinstance(checks, bool):
        leave(int(not checks))
    ready = all(check.status != "failed" for check in checks)
    out = outliers(checks, found.nodes)
    if json:
        from shoal.cli.show import print_json

        told_all: dict[str, Any] = {"ready": ready, "nodes": found.nodes, "exclude": out}
        print_json({**told_all, "checks": [asdict(check) for check in checks]})
    else:
        last = "not ready: see the failed checks above"
        if out:
            last = f"not ready, for {' '.join(out)}; to go without: shoal launch --exclude {','.join(out)}"
        _print(checks, f"ready to train on {found.nodes} nodes: try shoal launch" if ready else last)
    leave(int(not ready))


def _by_hand(nodes: int | None, node_rank: int | None, place: tuple[str, int] | None) -> LaunchedRank:
    """This process's place, given by options when no launcher says so."""
    from shoal.facts.problem import BadInput
    from shoal.launch.adopt.launched_rank import LaunchedRank

    if nodes is None or node_rank is None or place is None:
        raise BadInput(
            "--cluster: no launcher has started this on the nodes of a job",
            "srun --ntasks-per-node=1 shoal doctor --cluster; or on each --nodes N --node-rank I --meet HOST:PORT",
        )
    if not 0 <= node_rank < nodes:
        raise BadInput(
            f"--node-rank {node_rank} of --nodes {nodes}: they count from 0", f"--node-rank {nodes - 1}"
        )
    return LaunchedRank(node_rank, nodes, 0, 1, "--node-rank", *place, per_node=nodes > 1)
