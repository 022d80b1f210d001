"""``shoal train``: train or resume."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shoal.cli.announce import announced
from shoal.cli.summary import answer, leave
from shoal.launch.report import FAILED, Report
from shoal.launch.screen import Console

if TYPE_CHECKING:
    from shoal.launch.adopt.launched_rank import LaunchedRank
    from shoal.plan.resolve import Job
    from shoal.train.run_directory import RunDirectory


def train(
    config: Path | None = None,
    /,
    *,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    layout: str | None = None,
    run: Path | None = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    extend: Annotated[bool, Parameter(negative=())] = False,
    branch: Path | None = None,
    nodes: str | None = None,
    node: str | None = None,
    meet: str | None = None,
    calibration: bool = True,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train; resume automatically if the run directory has a checkpoint.

    Example: shoal train examples/tiny.toml --set recipe.steps=200 --layout dp=2

    Ctrl-C (or SIGTERM, SIGUSR1) finishes the step, writes a checkpoint and exits with 75; the same command resumes.

    On several machines that share the run directory, run the same command on each with --nodes 2; with --nodes 1:2
    the run continues on the remaining machines if one is lost, and takes it back when it returns: docs/nodes.md.
    Under torchrun, srun and mpirun it adopts the ranks that they started; without a shared directory the machines meet
    at --meet HOST:PORT, and checkpoint.to holds the state: docs/launchers.md.

    A rank that keeps its peers waiting for fault.stall seconds (0: never report) is named with the collective and the
    line of code; a rank that runs out of memory, with the nearest change that fits: docs/faults.md.

    Parameters
    ----------
    config
        A TOML file; without one the embedded default is trained.
    set
        Override one value, as in recipe.lr=0.001. May be given several times.
    layout
        The parallel layout, as in dp=2, or auto.
    run
        The run directory itself; by default [run] dir and name.
    fresh
        Start over; an old run in the same directory is moved aside.
    extend
        Give the run more steps (recipe.steps), with the warm-up that it began with. If its learning rate is already
        decaying, the longer run branches from the last checkpoint before the decay, into its own directory.
    branch
        Start a new run from the whole state of this checkpoint, or of a run's newest: weights, optimizer, step.
    nodes
        How many machines run this command: a number, or minimum:maximum, as in 2:4.
    node
        This machine's name among them; by default its host name.
    meet
        HOST:PORT of the first machine, where the others find it; by default MASTER_ADDR and MASTER_PORT, what Slurm
        says, or a file in the run directory that all share.
    calibration
        Predict with the rates that shoal profile --calibrate measured here, if there are any.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    from shoal.launch.adopt.launched_rank import parse_meet, told

    place = parse_meet(meet) if meet is not None else None
    found = told(os.environ, place)
    asked = _Asked(config, set, layout, run, fresh, extend, branch, nodes, node, place, calibration, json)
    if found is not None and not found.per_node:
        return _adopted(asked, found)
    return _launched(asked, found)


@dataclass(frozen=True)
class _Asked:
    """The command line."""

    config: Path | None
    set: list[str] | None
    layout: str | None
    run: Path | None
    fresh: bool
    extend: bool
    branch: Path | None
    nodes: str | None
    node: str | None
    meet: tuple[str, int] | None
    calibration: bool
    json: bool


def _launched(asked: _Asked, found: LaunchedRank | None) -> int:
    """Start this machine's ranks. ``found``: a scheduler started this process on each of several machines."""
    from shoal.cli.show import use_calibration
    from shoal.facts.config.file import load
    from shoal.facts.problem import BadInput
    from shoal.launch import local
    from shoal.launch.nodes import train as on_nodes
    from shoal.launch.nodes.count import NodeCount, node_name
    from shoal.launch.nodes.meet import Meet

    use_calibration(asked.calibration)
    given = load(asked.config, asked.set, asked.layout)
    nodes = asked.nodes if asked.nodes is not None or found is None else str(found.world)
    together = NodeCount.parse(nodes) if nodes is not None else None
    if asked.meet is not None and together is None:
        raise BadInput("--meet is for several machines", "--nodes 2 --meet HOST:PORT, the same on each")
    meet = None
    if together is not None and together.most > 1:
        meet = Meet.of(asked.meet, found)
    job, directory, console = announced(
        given,
        asked.run,
        asked.fresh,
        node=node_name(asked.node or _slurm_name(found)) if together else None,
        nodes=together.most if together else 1,
    )
    if job.config.tune.search and job.config.layout != "auto":
        console.print(
            "tune.search: the layout is named, so no other is tried; shoal tune begins in it and tries others"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with given.located():
        job = local.fetched(job, console)
        job, directory = _further(job, directory, asked, together is not None, console)
        if together:
            report = on_nodes.train(job, directory, together, asked.fresh, console, visible, meet=meet)
        else:
            report = local.train(job, directory, asked.fresh, console, visible)
    return _answered(report, asked.json)


def _slurm_name(found: LaunchedRank | None) -> str | None:
    """The scheduler's name for this machine, which may differ from its host name."""
    return os.environ.get("SLURMD_NODENAME") if found is not None and found.by == "srun" else None


def _adopted(asked: _Asked, found: LaunchedRank) -> int:
    """Become one of the ranks that another launcher started. Errors that all ranks share are printed once per node."""
    from shoal.cli.show import use_calibration
    from shoal.facts.config.file import load
    from shoal.facts.problem import BadInput
    from shoal.launch import local
    from shoal.launch.nodes.count import node_name
    from shoal.launch.report import BAD_INPUT

    first = found.local_rank == 0
    try:
        if asked.nodes is not None:
            raise BadInput(
                f"--nodes {asked.nodes} under {found.by}, which has started {found.world} ranks already: two launchers "
                "for the same ranks",
                f"leave out --nodes; or one process on each node, and Shoal starts its ranks ({_ONE_EACH[found.by]})",
            )
        use_calibration(asked.calibration)
        given = load(asked.config, asked.set, asked.layout)
        job, directory, console = announced(
            given, asked.run, asked.fresh, nodes=found.nodes, ranks=found.local_world, quiet=found.rank > 0
        )
        # torch would print a page for every lost connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        train_rank = local.load_attempt("shoal.launch.adopt.train:train")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        with given.located():
            job = local.fetched(job, console)
            job, directory = _further(job, directory, asked, True, console)
            name = node_name(asked.node) if asked.node is not None else None
            report: Report = train_rank(job, directory, found, asked.fresh, console, visible, name)
    except BadInput as error:
        from shoal.launch.adopt.rank_rendezvous import Rival

        if first or isinstance(error, Rival):
            raise
        return BAD_INPUT
    if found.rank == 0 and (asked.json or report.code != FAILED):
        _answered(report, asked.json)
    return leave(report.code)


# How each launcher starts one process per node.
_ONE_EACH = {
    "torchrun": "shoal train itself",
    "mpirun": "mpirun --map-by ppr:1:node",
    "srun": "srun --ntasks-per-node=1",
    "the environment": "a pod each",
}


def _answered(report: Report, json: bool) -> int:
    tuning = {"tuning": report.tuning} if report.tuning is not None else {}
    return answer(report, json, {"heldout_loss": report.heldout_loss, "last": report.row, **tuning})


def _further(
    job: Job, run: RunDirectory, asked: _Asked, together: bool, console: Console
) -> tuple[Job, RunDirectory]:
    """Apply --extend and --branch to a job and its run."""
    from shoal.facts.problem import BadInput
    from shoal.launch import local
    from shoal.train import branch as further
    from shoal.train.checkpoint.listing import newest_sound

    extend, branch, fresh = asked.extend, asked.branch, asked.fresh
    if sum((extend, branch is not None, fresh)) > 1:
        raise BadInput("--extend, --branch and --fresh: only one of them at a time", "leave out the others")
    start = None
    if (extend or branch is not None) and job.config.recipe.epochs is not None:
        job = local.with_length(job, local.tokenised(job, console))
    if extend:
        found = further.extend(job, run)
        console.print(found.note, markup=False)
        job, run, start = found.job, found.run, found.branch
    elif branch is not None:
        start = newest_sound(branch)
    run.keep_in(job.config.checkpoint.to)
    if branch is not None and start is not None and run.begun:
        further.check_same_branch(run, branch, start)
    if start is not None and not run.begun:
        if together:
            raise BadInput(
                "a branch is begun on one machine", "the same command once without --nodes, on one of them"
            )
        further.check_branch(job, start)
        local.check(job, run, os.environ.get("CUDA_VISIBLE_DEVICES"))
        console.print(f"branching from {start.name}", markup=False)
        further.branch(job, run, start, local.tokenised(job, console).fingerprint)
    return job, run
