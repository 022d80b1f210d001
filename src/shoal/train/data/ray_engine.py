"""Tokenise on the nodes of a Ray cluster with Ray Data: every task is a row, and its spool files come back.

A node does exactly what a local worker process does, so the bytes are the same: which node has which task, and when it
finishes, never affects the result. Nodes read source files and tokenizer at the same paths as this machine, on a shared
file system, and are refused if they find different ones.
"""

from __future__ import annotations

import json
import logging
import socket
import tempfile
from collections.abc import Generator, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.facts.problem import BadInput
from shoal.train.data.encode import Encoded, EncodeTask, encode, open_once
from shoal.train.data.tokenizers import Tokenizer

SPOOLED = ("tokens", "ends", "answers", "hashes", "bad")
INSTALL = "pip install 'ray[data]' here and on its nodes; or leave out data.ray"
SHARED = "put the data, the tokenizer and data.cache on a file system that all nodes share"


def encode_on_ray(
    tasks: list[EncodeTask], tokenizer: Tokenizer, tokenizer_text: str, end_token: str | None, address: str
) -> Generator[tuple[EncodeTask, Encoded]]:
    """Each task as it finishes, with its files spooled here."""
    ray, data, began = _joined(address)
    given = ray.put((tasks, tokenizer_text, end_token, tokenizer.fingerprint, __version__))

    def work(row: dict[str, Any]) -> dict[str, Any]:
        return encode_away(int(row["id"]), *ray.get(given))

    # One row per block: nodes get tasks as they finish others.
    each = data.range(len(tasks), override_num_blocks=len(tasks)).map(work)
    try:
        yield from _spooled(tasks, each.iter_rows())
    finally:
        if began:
            ray.shutdown()


def _spooled(
    tasks: list[EncodeTask], done: Iterable[dict[str, Any]]
) -> Generator[tuple[EncodeTask, Encoded]]:
    for row in done:
        if row["problem"]:
            raise BadInput(str(row["problem"]), SHARED)
        task = tasks[int(row["number"])]
        for suffix in SPOOLED:
            task.file(suffix).write_bytes(row[suffix])
        encoded = json.loads(row["encoded"])
        yield task, Encoded(**{**encoded, "lines": tuple(encoded["lines"])})


def encode_away(
    number: int,
    tasks: list[EncodeTask],
    tokenizer_text: str,
    end_token: str | None,
    fingerprint: str,
    version: str,
) -> dict[str, Any]:
    """On a node: run one task and return the content of its spool files. Arguments are texts and bytes, because
    tables have no dictionaries.
    """
    empty: dict[str, Any] = {"number": number, "problem": "", "encoded": "", **dict.fromkeys(SPOOLED, b"")}
    task = tasks[number]
    if problem := _other_than_there(task, tokenizer_text, end_token, fingerprint, version):
        return {**empty, "problem": problem}
    with tempfile.TemporaryDirectory() as spool:
        here = replace(task, spool=Path(spool))
        encoded = encode(here, open_once(tokenizer_text, end_token))
        contents = {suffix: here.file(suffix).read_bytes() for suffix in SPOOLED}
    return {**empty, "encoded": json.dumps(asdict(encoded)), **contents}


def _other_than_there(
    task: EncodeTask, tokenizer_text: str, end_token: str | None, fingerprint: str, version: str
) -> str:
    """What differs on this node from the machine that asks; empty if nothing."""
    node = socket.gethostname()
    if version != __version__:
        return f"data.ray: the node {node} has Shoal {__version__}, and not {version}"
    for file in {piece.file for piece in task.pieces}:
        if not file.unchanged():
            return f"data.ray: the node {node} has not the same {file.name}"
    try:
        found = open_once(tokenizer_text, end_token).fingerprint
    except BadInput as error:
        return f"data.ray: the node {node}: {error.problems[0].what}"
    return "" if found == fingerprint else f"data.ray: the node {node} has another tokenizer"


def _joined(address: str) -> tuple[Any, Any, bool]:
    """Ray and Ray Data, connected to the cluster; and whether this process had to join it."""
    try:
        import ray
        import ray.data as data
    except ImportError as error:
        raise BadInput(f"data.ray needs Ray Data: {error}", INSTALL) from None
    began = not ray.is_initialized()
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()
        raise BadInput(
            f"data.ray = {address!r}: no Ray cluster answers: {first[0] if first else type(error).__name__}",
            "ray start --head there, and its HOST:PORT; or leave out data.ray",
        ) from None
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray, data, began
