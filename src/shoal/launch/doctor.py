"""Checks behind ``shoal doctor``; each examines one thing and says how to fix it."""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import GIB
from shoal.facts.cluster.this_machine import look
from shoal.train.files import sync_directory

Status = Literal["ok", "warning", "failed"]

PATIENCE = 90.0  # seconds for torch to import and two processes to connect; a cold disk takes tens
OLDEST_PYTHON = (3, 11)
LEAST_DISK, COMFORTABLE_DISK = 1 * GIB, 20 * GIB
LEAST_SHARED_MEMORY = 1 * GIB
LARGEST_SKEW = 2.0  # seconds between this clock and the file system's

_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Check:
    """What was examined, the result, and the fix if there is a problem."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def examine(
    run_directory: Path,
    visible: str | None = None,
    here: Cluster | None = None,
    torch: dict[str, Any] | None = None,
) -> list[Check]:
    """All checks, in the order in which a run would hit the problems. ``visible``: CUDA_VISIBLE_DEVICES.

    ``here`` and ``torch``: this machine, and torch's own answers, if already known.
    """
    here = here or look(visible)
    torch = torch or ask_torch()
    return [
        python(),
        *dependencies(),
        *torch_works(torch),
        devices(here, torch),
        port(),
        host_name(),
        *storage(run_directory),
        *limits(accelerated=here.device.name != "cpu"),
    ]


def python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", "failed", version, "install Python 3.11 or newer")
    return Check("python", "ok", version)


# Extras that this version uses; the others are installed with what needs them.
USED_EXTRAS = frozenset({"hf"})


def dependencies() -> Iterator[Check]:
    """Compare Shoal's declared dependencies with what is installed. A missing extra is a choice, not a fault."""
    try:
        declared = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("shoal", "warning", "is not installed, its needs are unknown", "pip install -e .")
        return
    extras: dict[str, list[str]] = {}
    for name, bounds, extra in map(parse_requirement, declared):
        version = _installed(name)
        if extra:
            extras.setdefault(extra, []).extend(
                [] if version and within(version, bounds) else [name + bounds]
            )
        elif version is None:
            yield Check(name, "failed", "not installed", f"pip install '{name}{bounds}'")
        elif not within(version, bounds):
            yield Check(name, "failed", f"{version} is outside {bounds}", f"pip install '{name}{bounds}'")
        else:
            yield Check(name, "ok", version)
    for extra in USED_EXTRAS & extras.keys():
        missing = extras[extra]
        detail = f"not installed: pip install -e '.[{extra}]' in Shoal's checkout" if missing else "installed"
        yield Check(f"extra {extra}", "ok", detail)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_requirement(text: str) -> tuple[str, str, str]:
    """Split ``tokenizers>=0.20; extra == "hf"`` into name, bounds and extra (empty if there is none)."""
    requirement, _, marker = text.partition(";")
    named = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*(.*)", requirement)
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    return (named[1] if named else text), (named[2].strip() if named else ""), (extra[1] if extra else "")


def within(version: str, bounds: str) -> bool:
    """Whether a version satisfies bounds such as ``>=2.11,<2.14``."""
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        parts = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*(.+)", bound)
        if parts and not _COMPARE[parts[1]](_release(version), _release(parts[2])):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13, 0, 0, 0, 0): padded, so that 2.11 equals 2.11.0."""
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    return tuple([*numbers, 0, 0, 0, 0, 0, 0][:6])


def ask_torch() -> dict[str, Any]:
    """What torch says about itself, from another process: it may crash or hang without affecting this one."""
    command = [sys.executable, "-c", "from shoal.launch.doctor import answer_for_torch; answer_for_torch()"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=PATIENCE)
        ended = f"it ended with status {process.returncode}"
        trouble = (errors.strip().splitlines() or [ended])[-1] if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also its second rank, which holds the same pipes
        output, _ = process.communicate()
        trouble = f"no answer within {PATIENCE:.0f} s"
    answers: dict[str, Any] = {"trouble": trouble}
    for line in output.splitlines():
        if line.startswith("{"):
            answers.update(json.loads(line))
    return answers


def answer_for_torch() -> None:
    """Runs in the other process: prints one JSON line per answer, so that a hang loses only the rest."""
    import torch
    import torch.distributed

    nccl = getattr(torch.cuda, "nccl", None) if torch.backends.cuda.is_built() else None
    built = {"cuda": torch.version.cuda or "", "nccl": ".".join(map(str, nccl.version())) if nccl else ""}
    print(json.dumps({"version": torch.__version__, **built}), flush=True)
    print(json.dumps({"distributed": torch.distributed.is_available()}), flush=True)
    if torch.distributed.is_available():
        with tempfile.TemporaryDirectory() as meeting:
            seconds = _all_reduce(f"file://{meeting}/store")
        print(json.dumps({"all_reduce_seconds": seconds}), flush=True)
    # After the fork in _all_reduce: asking for devices may start a driver that does not survive a fork.
    print(json.dumps({"devices": torch.cuda.device_count()}), flush=True)


def _all_reduce(meeting: str) -> float:
    """Two processes on loopback sum 4 MiB with gloo; returns seconds per sum."""
    import torch
    import torch.distributed as distributed

    # By default gloo listens on the address that the host's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = next(
        (name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo"
    )
    patience = timedelta(seconds=PATIENCE / 3)
    child = os.fork()
    try:
        rank = 0 if child else 1
        distributed.init_process_group("gloo", meeting, timeout=patience, rank=rank, world_size=2)
        tensor = torch.ones(2**20)
        distributed.all_reduce(tensor)
        started = time.perf_counter()
        for _ in range(5):
            distributed.all_reduce(tensor)
        seconds = (time.perf_counter() - started) / 5
        distributed.destroy_process_group()
    finally:
        if not child:
            os._exit(0)  # the second rank must not continue with the first one's work
    os.waitpid(child, 0)
    if tensor[0] != 2.0**6:
        raise RuntimeError(f"six sums of two ones gave {tensor[0]:.0f}, not 64")
    return seconds


def torch_works(answers: dict[str, Any]) -> Iterator[Check]:
    """Whether torch imports, supports distributed, and reaches another process on this machine."""
    trouble = answers["trouble"]
    if "version" not in answers:
        fix = "reinstall it within the bounds shoal declares: pip install --force-reinstall torch"
        yield Check("torch imports", "failed", trouble, fix)
        return
    yield Check("torch imports", "ok", answers["version"])
    if not answers.get("distributed"):
        yield Check(
            "torch.distributed", "failed", "not in this build of torch", "install an official build of torch"
        )
    elif "all_reduce_seconds" in answers:
        seconds = answers["all_reduce_seconds"]
        detail = f"4 MiB between two processes in {seconds * 1e3:.1f} ms ({2**22 / seconds / 1e9:.1f} GB/s)"
        yield Check("gloo on loopback", "ok", detail)
    else:
        fix = "allow TCP on 127.0.0.1 (firewall, sandbox) and bring up the loopback interface"
        yield Check("gloo on loopback", "failed", trouble, fix)


def devices(here: Cluster, answers: dict[str, Any]) -> Check:
    """What the drivers list, and whether torch sees as many."""
    device, memory = here.device, here.device.memory_bytes / GIB
    if device.name == "cpu":
        return Check("devices", "ok", f"no accelerator; cpu with {memory:.1f} GiB")
    detail = f"{here.devices} × {device.name} with {memory:.1f} GiB"
    seen = answers.get("devices")
    if seen == here.devices:
        return Check("devices", "ok", detail)
    if not seen:
        fix = "install the build of torch for your driver (pytorch.org says which)"
        return Check("devices", "failed", f"{detail}, of which torch sees none", fix)
    fix = "set CUDA_VISIBLE_DEVICES to devices of one kind"
    return Check("devices", "warning", f"{detail}, but torch sees {seen}", fix)


def port() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check("port", "ok", f"{server.getsockname()[1]} on loopback is free")
    except OSError as error:
        return Check("port", "failed", f"cannot listen on loopback: {error}", "bring up the interface lo")


def host_name() -> Check:
    """Whether this host's own name resolves. A slow name server counts as no answer."""
    name = socket.gethostname()
    found: list[str] = []

    def resolve() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, None)[0][4][0]))
        except OSError:
            return

    asking = threading.Thread(target=resolve, daemon=True)
    asking.start()
    asking.join(timeout=5)
    if found:
        return Check("host name", "ok", f"{name} is {found[0]}")
    return Check("host name", "warning", f"{name} does not resolve", f"add '127.0.1.1 {name}' to /etc/hosts")


def storage(run_directory: Path) -> Iterator[Check]:
    """Space, writing, syncing and the clock where the run will be stored. Leaves nothing behind."""
    home = run_directory.absolute()
    other = "choose another place: --run DIR, or run.dir in the config"
    try:
        while not home.exists():
            home = home.parent
        free = shutil.disk_usage(home).free
        with tempfile.TemporaryDirectory(prefix=".shoal-doctor-", dir=home) as scratch:
            seconds, skew = _commit(Path(scratch))
    except OSError as error:
        yield Check("run directory", "failed", f"cannot write in {home}: {error.strerror}", other)
        return
    yield Check("run directory", "ok", f"1 MiB written, synced and renamed in {seconds * 1e3:.1f} ms")
    status: Status = "failed" if free < LEAST_DISK else "warning" if free < COMFORTABLE_DISK else "ok"
    fix = "" if status == "ok" else f"free some space there, or {other}"
    yield Check("disk", status, f"{free / GIB:.1f} GiB free at {home}", fix)
    if abs(skew) > LARGEST_SKEW:
        detail = f"the file system's is {skew:+.1f} s from this machine's"
        yield Check("clock", "warning", detail, "synchronise both with NTP, such as chronyd")
    else:
        yield Check("clock", "ok", "agrees with the file system's")


def _commit(scratch: Path) -> tuple[float, float]:
    """Write as a checkpoint is written; returns the seconds it took, and the file time's offset from our clock."""
    started = time.perf_counter()
    with (scratch / "piece").open("wb") as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
        now = time.time()
    (scratch / "piece").rename(scratch / "committed")
    sync_directory(scratch)
    return time.perf_counter() - started, (scratch / "committed").stat().st_mtime - now


def limits(accelerated: bool) -> Iterator[Check]:
    """The system's limits per process. Accelerators need higher ones."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < (4096 if accelerated else 1024)  # negative means unlimited
    detail = f"at most {files}" if files >= 0 else "unlimited"
    yield Check("open files", "warning" if few else "ok", detail, "ulimit -n 65536" if few else "")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if accelerated and locked != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1): network adapters lock their buffers"
        yield Check("locked memory", "warning", f"at most {locked / 2**20:.0f} MiB", fix)
    shared = Path("/dev/shm")  # noqa: S108 it is only measured
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < LEAST_SHARED_MEMORY
        fix = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm" if small else ""
        yield Check("shared memory", "warning" if small else "ok", f"{size / GIB:.1f} GiB at /dev/shm", fix)
