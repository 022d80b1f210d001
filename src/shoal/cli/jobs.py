"""``shoal status``, ``logs``, ``cancel`` and ``ls``: jobs that were submitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from shoal.launch.jobs.record import JobRecord

Json = Annotated[bool, Parameter(negative=())]


def status(run: Path, /, *, json: Json = False) -> int:
    """Show what the engine says about a run's job, and the run's progress.

    Example: shoal status runs/my-run

    Parameters
    ----------
    run
        The run directory.
    json
        Print one JSON document.
    """
    from shoal.cli.show import print_json
    from shoal.launch.jobs.record import read_record

    found = _told(read_record(run))
    if json:
        print_json(found)
        return 0
    words = f"{found['target']} {found['id']}: {found['state']}"
    print(words + (f" ({found['detail']})" if found["detail"] else ""))
    if found["nodes"]:
        print(f"nodes: {found['nodes']}; restarts: {found['restarts']}")
    if found["step"]:
        print(f"step {found['step']} of {found['steps']}, loss {found['loss']}, layout {found['layout']}")
    print(f"run: {found['run']}")
    return 0


def _told(record: JobRecord) -> dict[str, Any]:
    from shoal.facts.input.untrusted_files import parse_toml
    from shoal.launch.jobs.targets import find_target
    from shoal.train.files import last_row

    found = find_target(record.job.target).status(record)
    row = last_row(record.run / "metrics.jsonl") or {}
    return {
        "run": str(record.run),
        "target": record.job.target,
        "id": record.id,
        "state": found.state,
        "detail": found.detail,
        "nodes": found.nodes,
        "restarts": found.restarts,
        "exit_code": found.exit_code,
        "step": row.get("step", 0),
        "steps": parse_toml(record.job.config)["recipe"]["steps"],
        "loss": row.get("loss"),
        "layout": row.get("layout", record.job.layout),
        "submitted": record.submitted,
    }


def logs(
    run: Path,
    /,
    *,
    rank: int | None = None,
    lines: int = 50,
    follow: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show what a run's job printed: its launchers, or one of its ranks.

    Example: shoal logs runs/my-run --follow

    Parameters
    ----------
    run
        The run directory.
    rank
        The log of this rank.
    lines
        How many of the last lines.
    follow
        Follow it until the job is over.
    """
    from shoal.facts.problem import BadInput
    from shoal.facts.redact import printable
    from shoal.launch.jobs.follow import follow as to_end
    from shoal.launch.jobs.follow import last_lines
    from shoal.launch.jobs.record import read_record
    from shoal.launch.jobs.targets import find_target
    from shoal.train.run_directory import RunDirectory

    record = read_record(run)
    target = find_target(record.job.target)
    path: Path | None
    if rank is not None:
        path = RunDirectory(run).log(rank)
        if not path.exists():
            raise BadInput(f"--rank {rank}: there is no {path}", "has the run begun? shoal status tells")
        text = last_lines(path, lines)
    else:
        path, text = target.log_file(record), target.logs(record, lines)
    if not follow:
        print("\n".join(map(printable, text.splitlines())))
        return 0
    try:
        to_end(path, lambda: target.status(record), lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("no longer following; the job goes on", file=sys.stderr)
    return 0


def cancel(run: Path, /, *, now: Annotated[bool, Parameter(negative=())] = False, json: Json = False) -> int:
    """Stop a run's job after a step and a commit; it does not restart by itself.

    Example: shoal cancel runs/my-run

    Parameters
    ----------
    run
        The run directory.
    now
        Stop it at once: progress since the last checkpoint is lost.
    json
        Print one JSON document.
    """
    from shoal.cli.show import print_json
    from shoal.launch.jobs.record import read_record
    from shoal.launch.jobs.targets import find_target

    record = read_record(run)
    done = find_target(record.job.target).cancel(record, now)
    if json:
        print_json({"run": str(record.run), "target": record.job.target, "id": record.id, "done": done})
    else:
        print(done)
    return 0


def ls(runs: Path = Path("runs"), /, *, json: Json = False) -> int:
    """List the jobs that were submitted for the runs in a directory, the newest first.

    Example: shoal ls runs

    Parameters
    ----------
    runs
        The directory of run directories.
    json
        Print one JSON document.
    """
    from shoal.cli.show import print_columns, print_json
    from shoal.facts.problem import BadInput
    from shoal.launch.jobs.record import records

    if not runs.is_dir():
        raise BadInput(f"there is no directory {runs}", "the directory of runs: shoal ls DIR")
    rows = []
    for record in records(runs):
        try:
            rows.append(_told(record))
        except BadInput as error:  # an engine that is missing must not hide other engines' jobs
            known = {"run": str(record.run), "target": record.job.target, "id": record.id, "step": 0}
            rows.append({**known, "state": "unknown", "detail": str(error.problems[0].what), "steps": 0})
    if json:
        print_json({"jobs": rows})
    elif rows:
        head = ("run", "target", "id", "state", "step", "detail")
        cells = [
            (
                row["run"],
                row["target"],
                row["id"],
                row["state"],
                f"{row['step']}/{row['steps']}",
                row["detail"],
            )
            for row in rows
        ]
        print_columns([head, *cells])
    else:
        print(f"no jobs in {runs}; shoal launch --submit sends one")
    return 0
