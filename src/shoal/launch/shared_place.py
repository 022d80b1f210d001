"""Check whether several nodes see the same run directory and checkpoints: one leaves a token, others look for it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from shoal.facts.problem import BadInput
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.files import private_files, replace_text
from shoal.train.run_directory import RunDirectory

MARK = ".shared"


def leave_token(run: RunDirectory, token: str) -> None:
    """Write it where other nodes will look."""
    with private_files():
        replace_text(run.path / MARK, token + "\n")
    if isinstance(run.disk, ObjectStore):
        run.disk.leave(MARK.lstrip("."), token)


def shares_directory(run: RunDirectory, token: str) -> bool:
    return _read(run.path / MARK) == token


def check_state_is_shared(run: RunDirectory, token: str, node: str, first: str) -> None:
    """Refuse a node that would read other checkpoints than the ``first`` node writes."""
    if shares_directory(run, token):
        return
    if not isinstance(run.disk, ObjectStore):
        raise BadInput(
            f"{run.path} on node {node} is not the directory that node {first} has: it is not shared",
            "a directory that all nodes share: --run DIR; or a store for the state: --set checkpoint.to=s3://bucket/runs",
        )
    if run.disk.left(MARK.lstrip(".")) != token:
        raise BadInput(
            f"checkpoint.to: {run.disk.url} on node {node} is not what node {first} has there",
            "a store that all nodes reach: --set checkpoint.to=s3://bucket/runs",
        )


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""
