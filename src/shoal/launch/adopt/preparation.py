"""What adopted ranks settle before any device is used: the data, that they agree, and who owns the run directory."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console

from shoal import __version__
from shoal.facts.cluster import this_machine
from shoal.facts.problem import BadInput, Problem
from shoal.launch import local
from shoal.launch.adopt.launched_rank import LaunchedRank, check_order
from shoal.launch.adopt.rank_rendezvous import RankRendezvous
from shoal.launch.backend import check_backend
from shoal.launch.interfaces import address_of
from shoal.launch.manifest import describe_plan, describe_run
from shoal.launch.nodes.count import of_all_nodes
from shoal.launch.report import Report
from shoal.launch.scratch import check_scratch
from shoal.launch.shared_place import check_state_is_shared, leave_token, shares_directory
from shoal.launch.track.tracking import check_trackers
from shoal.parallel.hosts import PATIENCE
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.train.data.collection import Collection
from shoal.train.files import private_files
from shoal.train.guard.agreement import Disagreement, agree
from shoal.train.run_directory import UNKNOWN, RunDirectory, identity

# Keys of a round's store: what ranks refuse, what the first rank found, what nodes reply, and its go-ahead.
REFUSED, START, NODE, GO = "refused", "start", "node", "go"


@dataclass
class Prepared:
    """What a rank needs to begin."""

    job: Job
    run: RunDirectory
    dataset: Collection
    attempt: str  # a name unique among all attempts at the run
    done: Report | None = None  # set if there is nothing to do


def check(job: Job, run: RunDirectory, told: LaunchedRank, visible: str | None) -> None:
    """Refuse what this rank cannot train here. Creates nothing."""
    check_order(told)
    if job.config.server.servers:
        raise BadInput(
            f"server.servers = {job.config.server.servers} under {told.by}: Shoal starts servers and workers itself",
            "shoal train without it, or server.servers = 0",
        )
    if job.config.tune.search and job.config.layout == "auto":
        raise BadInput(
            f"tune.search = true under {told.by}, whose ranks cannot change their layout",
            "--set tune.search=false, or shoal train without it",
        )
    if job.layout.world != told.world:
        raise BadInput(
            f"layout {job.layout} has {job.layout.world} rank(s), and {told.by} started {told.world}",
            f"a layout of {told.world}: --layout dp={told.world}; or start {job.layout.world}",
        )
    _check_devices(job, told, visible)
    local.check_memory(job, told.nodes)
    check_scratch(job, run.path, told.nodes)
    check_backend(job)
    address_of(job.config.cluster.interface)
    run.check_place()
    run.keep_in(job.config.checkpoint.to)
    if told.local_rank == 0:
        run.check_reachable()
    if told.rank == 0:
        check_trackers(job.config, told.nodes)


def _check_devices(job: Job, told: LaunchedRank, visible: str | None) -> None:
    """Check devices; a scheduler may show each rank only its own."""
    if job.cluster.device.name == "cpu":
        return
    here = this_machine.look(visible)
    bound = here.device.name != "cpu" and here.devices == 1
    if not bound:
        local.check_devices(job, visible, told.nodes)


def prepare(
    job: Job,
    run: RunDirectory,
    told: LaunchedRank,
    fresh: bool,
    visible: str | None,
    call: RankRendezvous,
    console: Console,
    held: ExitStack,
) -> Prepared:
    """Called by all ranks. If one rank refuses, all do, with the same message. ``held``: locks, until the end."""
    problems: list[Problem] = []
    dataset = None
    call.refuse_rival()
    try:
        check(job, run, told, visible)
        dataset = _data(job, told, call, console)
        job = local.with_length(job, dataset)
    except BadInput as error:
        problems = [*error.problems]
    store = call.answer(lambda text: console.print(text, markup=False))
    _refuse_together(store, told, problems)
    assert dataset is not None
    facts = {
        "layout": str(job.layout),
        "config": json.dumps(of_all_nodes(job.config)),
        "model": job.model.model_dump_json(),
        "data": dataset.fingerprint,
        "run": run.path.name,
        "torch": torch.__version__,
        "shoal": __version__,
    }
    try:
        agree(store, told.rank, told.world, facts, timedelta(seconds=max(120.0, job.config.fault.timeout)))
    except Disagreement as error:
        what, _, fix = str(error).partition(" fix: ")
        raise BadInput(what, fix) from None
    if told.rank == 0:
        return _lead(job, run, told, fresh and call.number == 1, store, dataset, console, held)
    return _follow(job, run, told, store, dataset, held)


def _data(job: Job, told: LaunchedRank, call: RankRendezvous, console: Console) -> Collection:
    """Tokenised by one rank of each node; the others find the result."""
    key = f"data-{told.node}"
    if told.local_rank == 0:
        try:
            return local.tokenised(job, console)
        finally:
            call.store.set(key, "")
    call.store.wait(key, PATIENCE)
    return local.tokenised(job, console)


def _refuse_together(store: SignedStore, told: LaunchedRank, problems: list[Problem]) -> None:
    """Report problems of any rank on every rank, once; the first rank names where they occurred."""
    store.set(f"{REFUSED}-{told.rank}", _in_words(problems))
    if told.rank != 0:
        every = json.loads(store.wait(REFUSED, PATIENCE))
    else:
        answers = store.wait_for([f"{REFUSED}-{rank}" for rank in range(told.world)], PATIENCE)
        mine = {one["what"] for one in json.loads(answers[0])}
        every = json.loads(answers[0])
        for rank, answer in enumerate(answers[1:], 1):
            for one in json.loads(answer):
                if one["what"] not in mine:
                    mine.add(one["what"])
                    every.append({**one, "what": f"rank {rank}: {one['what']}"})
        store.set(REFUSED, json.dumps(every))
    if every:
        raise BadInput([Problem(**one) for one in every])


def _in_words(problems: list[Problem] | tuple[Problem, ...]) -> str:
    return json.dumps([{"what": one.what, "fix": one.fix} for one in problems])


def _lead(
    job: Job,
    run: RunDirectory,
    told: LaunchedRank,
    fresh: bool,
    store: SignedStore,
    dataset: Collection,
    console: Console,
    held: ExitStack,
) -> Prepared:
    """The first rank does for the run directory what a launcher does."""
    new = not run.path.exists()
    try:
        if not new:
            held.enter_context(run.held())
        start = local.prepare(job, run, fresh, console, dataset, held)
        if isinstance(start, Report):
            store.set(START, json.dumps({"done": [start.code, start.step, start.message]}))
            return Prepared(job, run, dataset, "", done=start)
        drawn = run.id if run.id != UNKNOWN else secrets.token_hex(8)
        start, token, attempt = {**start, "id": drawn}, secrets.token_hex(16), secrets.token_hex(4)
        if told.nodes > 1:
            leave_token(run, token)
        host = socket.gethostname()
        store.set(START, json.dumps({"start": start, "token": token, "attempt": attempt, "host": host}))
        nodes = [rank for rank in range(told.world) if rank and rank % told.local_world == 0]
        answers = [json.loads(one) for one in store.wait_for([f"{NODE}-{rank}" for rank in nodes], PATIENCE)]
        if any(answers):
            raise BadInput([Problem(**one) for one in next(filter(None, answers))])
        held.enter_context(local.begun(job, run, console, start))
    except BadInput as error:
        told_all = json.dumps({"refused": json.loads(_in_words(error.problems))})
        store.set(START, told_all)
        store.set(GO, told_all)
        if new:
            held.close()
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    store.set(GO, "{}")
    return Prepared(job, run, dataset, attempt)


def _follow(
    job: Job, run: RunDirectory, told: LaunchedRank, store: SignedStore, dataset: Collection, held: ExitStack
) -> Prepared:
    """Another rank gets what the first one found; one on another node checks that it sees the same state."""
    found = json.loads(store.wait(START, PATIENCE))
    _raise_refused(found)
    if "done" in found:
        code, step, message = found["done"]
        return Prepared(job, run, dataset, "", done=Report(code, run.path, step, message, None, None))
    if told.local_rank == 0:
        problems: tuple[Problem, ...] = ()
        try:
            _take_place(job, run, told, found, dataset, held)
        except BadInput as error:
            problems = error.problems
        store.set(f"{NODE}-{told.rank}", _in_words(problems))
    _raise_refused(json.loads(store.wait(GO, PATIENCE)))
    return Prepared(job, run, dataset, found["attempt"])


def _raise_refused(found: dict[str, Any]) -> None:
    if "refused" in found:
        raise BadInput([Problem(**one) for one in found["refused"]])


def _take_place(
    job: Job,
    run: RunDirectory,
    told: LaunchedRank,
    found: dict[str, Any],
    dataset: Collection,
    held: ExitStack,
) -> None:
    """For a node with its own run directory: lock it, and initialise it like the first node's."""
    check_state_is_shared(run, found["token"], f"{socket.gethostname()} (rank {told.rank})", found["host"])
    if shares_directory(run, found["token"]):
        return
    held.enter_context(run.held())
    with private_files():
        start = {**describe_run(job, dataset.path), "identity": identity(job, dataset.fingerprint)}
        run.write_start(job, {**start, "id": found["start"]["id"]}, describe_plan(job))
