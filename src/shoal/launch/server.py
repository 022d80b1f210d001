"""The processes of a parameter server: servers, which torchrun's agent starts, and workers, which come and go."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from shoal.facts.cluster import notation
from shoal.facts.layout import Layout
from shoal.launch import rendezvous
from shoal.launch.assignment import Assignment
from shoal.launch.environment import keep_only_passed
from shoal.launch.init_rank import thread_count
from shoal.launch.interfaces import interface_of
from shoal.launch.worker import end_with_launcher, own_session, print_to, work
from shoal.observe.flight_recorder import Announce, no_announce
from shoal.parallel import device_context
from shoal.parallel.hosts import PATIENCE
from shoal.parallel.mesh import Mesh
from shoal.parallel.server import WORKER, LinkLost, ServerLink
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.train.files import OWNER_ONLY
from shoal.train.outcome import Outcome
from shoal.train.run_directory import RunDirectory
from shoal.train.server.serve import JOINED, link_name, serve
from shoal.train.server.worker import ServerWorker

ENTRYPOINT = "shoal.launch.server:run_server"
# The exit code of a worker that has lost its link to a server.
LOST_A_SERVER = 4


def run_server(assignment: Assignment) -> Outcome | None:
    """The process of one server: a rank like any other, except that it only holds a shard and trains nothing."""
    job = assignment.job
    own = server_job(job)
    return work(replace(assignment, job=own), main=partial(serve, job))


def server_job(job: Job) -> Job:
    """The servers' job: ranks on the CPU that shard states and parameters."""
    count = job.config.server.servers
    layout = Layout(fsdp=count, zero=1) if count > 1 else Layout()
    return replace(job, layout=layout, cluster=notation.find(f"{count}xcpu"))


def begin_worker(entrypoint: str, arguments: tuple[Any, ...]) -> None:
    """A worker's first line, which calls "module:function"."""
    module, _, function = entrypoint.partition(":")
    getattr(importlib.import_module(module), function)(*arguments)


def work_for_servers(
    assignment: Assignment,
    number: int,
    incarnation: int,
    address: str,
    port: int,
    announce: Announce = no_announce,
) -> None:
    """A worker's process, from first to last line; it exits with 0 only if its work is done."""
    end_with_launcher()
    own_session()
    os.umask(OWNER_ONLY)
    job = assignment.job
    keep_only_passed(job.config)
    run = RunDirectory(assignment.run, assignment.node)
    print_to(run.log(job.processes + number))
    try:
        store = rendezvous.connect(port, assignment.secret, job.config.fault.timeout, address)
        attempt = rendezvous.attempt_store(store, assignment.round)
        mesh = _alone(job, number)
        attempt.set(JOINED.format(number), str(incarnation))
        links = _links(attempt, number, incarnation, job.config.server.servers)
        ServerWorker(job, run, assignment.dataset, mesh, links, announce).run_to_end()
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        # Skip the interpreter's own report, and threads of links that are gone.
        os._exit(LOST_A_SERVER if isinstance(error, LinkLost) else 1)
    sys.stdout.flush()
    os._exit(0)


def _links(attempt: SignedStore, number: int, incarnation: int, servers: int) -> Sequence[ServerLink]:
    # A dead server closes the link at once; a live one may have no work left to hand out for a long time.
    return [
        ServerLink(attempt.plain, link_name(number, incarnation, server), WORKER, PATIENCE)
        for server in range(servers)
    ]


def _alone(job: Job, number: int) -> Mesh:
    """A world of one rank, with this worker's device and threads."""
    interface = interface_of(job.config.cluster.interface)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    device = torch.device("cpu")
    if job.cluster.device.name == "cpu":
        torch.set_num_threads(thread_count(job, job.layout.world))
    else:
        device = torch.device("cuda", number % torch.cuda.device_count())
        device_context.take(device)
    return Mesh(Layout(), 0, device, timeout=timedelta(seconds=job.config.fault.timeout))
