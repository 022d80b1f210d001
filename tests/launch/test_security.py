"""What a run shows to others: no port beyond loopback, no secret in any artifact, no file but to its owner."""

from __future__ import annotations

import ast
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.conftest import Train
from tests.launch import leaking
from torch.distributed import HashStore, TCPStore

import shoal
from shoal.cli.main import main
from shoal.facts.config import CheckpointSection, Config, RunSection
from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch import rendezvous
from shoal.launch.assignment import Assignment
from shoal.launch.backend import check_backend
from shoal.launch.environment import LEFT_OUT, keep_only_passed, passed_on, passes
from shoal.launch.init_rank import init_rank, name_interface
from shoal.launch.interfaces import LOOPBACK, address_of, interface_of
from shoal.launch.redacted import LogRedactor
from shoal.launch.rendezvous import LoopbackRendezvous
from shoal.launch.report import FINISHED
from shoal.parallel.signed_store import SignedStore, new_secret
from shoal.plan.resolve import resolve
from shoal.train.checkpoint import node_memory
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

SETTLED = 3  # steps after which all ports are open


# Ports.


def family(process: int) -> list[int]:
    """A process and all that it has started, and they in turn."""
    children = [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [process, *(one for child in children for one in family(child))]


def listeners(processes: list[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses at which these processes listen for TCP connections, as the kernel has them."""
    ours = set()
    for process in processes:
        for handle in Path(f"/proc/{process}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", str(handle.readlink()))
            except FileNotFoundError:
                continue
            if found:
                ours.add(found[1])
    addresses: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in ours:
                words = bytes.fromhex(local.partition(":")[0])
                # Words of four bytes, each in this machine's order.
                turned = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                addresses.append(ipaddress.ip_address(turned))
    return addresses


def told_by_ss(processes: list[int]) -> list[str]:
    """The same from ``ss``, where there is one."""
    if shutil.which("ss") is None:
        return []
    said = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    return [
        line.split()[3]
        for line in said.splitlines()
        if {int(process) for process in re.findall(r"pid=(\d+)", line)} & set(processes)
    ]


@pytest.fixture
def started(
    settings: Callable[..., list[str]], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``shoal train`` as a process of its own, which has come past its first steps."""
    processes: list[subprocess.Popen[str]] = []

    def start(environment: dict[str, str], **overrides: object) -> subprocess.Popen[str]:
        values = settings(recipe__steps=100_000, checkpoint__every=0, **overrides)
        sets = [word for value in values for word in ("--set", value)]
        words = ["train", "--run", str(tmp_path / "run"), "--layout", "dp=2", *sets]
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        deadline = time.monotonic() + 90
        while len(read_rows(tmp_path / "run" / "metrics.jsonl")) < SETTLED:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.02)
        return process

    yield start
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_a_run_listens_on_loopback_alone_and_its_ranks_have_no_keys(
    started: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    secret, plain = "hf_AbCdEfGhIjKlMnOpQrSt", "not-passed-on-7"
    process = started(
        {"HF_TOKEN": secret, "SOMETHING_ELSE": plain, "MY_OWN": "mine"}, run__environment='["MY_*"]'
    )
    processes = family(process.pid)
    assert len(processes) >= 4  # launcher, fork server, two ranks
    found = listeners(processes)
    assert len(found) >= 3  # the store and a port for each rank at least
    assert {address.is_loopback for address in found} == {True}, found
    for address in told_by_ss(processes):
        assert ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback, address
    environments = {one: Path(f"/proc/{one}/environ").read_bytes() for one in processes}
    assert secret.encode() in environments.pop(process.pid)
    for one, environment in environments.items():
        assert secret.encode() not in environment and plain.encode() not in environment, one
        assert b"MY_OWN=mine" in environment and b"PATH=" in environment
    first = (tmp_path / "run" / "logs" / "rank-00000.log").read_text().splitlines()[0]
    assert re.match(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ not passed on to ranks \(see run.environment\): ", first
    )
    assert {"HF_TOKEN", "SOMETHING_ELSE"} <= set(first.split()) and "MY_OWN" not in first


@pytest.mark.parametrize(
    "name",
    (
        *("OFI_NCCL_PROTOCOL", "FI_PROVIDER", "SHARP_COLL_LOG_LEVEL", "MLX5_SINGLE_THREADED", "UCX_TLS"),
        *("NVSHMEM_BOOTSTRAP", "SLURM_JOB_ID", "NCCL_IB_HCA", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    ),
)
def test_what_a_fabric_is_told_reaches_the_ranks(name: str) -> None:
    assert passes(name) and not passes(f"{name}_PASSWORD")


def test_a_backend_that_is_not_here_is_refused(settings: Callable[..., list[str]]) -> None:
    def check(on: str, backend: str) -> None:
        check_backend(resolve(load(None, settings(cluster__on=on, cluster__backend=backend), "dp=1").config))

    check("1xH100", "nccl")
    check("1xcpu", "gloo")
    with pytest.raises(BadInput, match="torch_smddp, which cannot be imported here"):
        check("1xH100", "smddp")
    with pytest.raises(BadInput, match='"nccl" does not carry tensors of cpu'):
        check("1xcpu", "nccl")


def test_ranks_meet_at_the_interface_that_is_named(train: Train) -> None:
    """At another than loopback where this machine has one."""
    names = [name for _, name in socket.if_nameindex()]
    addresses = {}
    for name in names:
        try:
            addresses[name] = address_of(name)
        except BadInput as error:
            assert "has no IPv4 address" in str(error)
    interface = next((name for name in addresses if name != interface_of(None)), interface_of(None))
    meeting = LoopbackRendezvous("run", 5, address=address_of(interface))
    assert listeners([os.getpid()]).count(ipaddress.ip_address(meeting.address)) >= 1
    run = train(layout="dp=2", recipe__steps=2, cluster__interface=interface)
    assert run.report.code == FINISHED, run.report.message


@pytest.mark.parametrize(("named", "used"), [(None, interface_of(None)), ("ib0", "ib0")])
def test_gloo_and_nccl_are_told_where_to_listen(
    named: str | None, used: str, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # and afterwards it is as it was
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    job = resolve(load(None, settings(cluster__interface=named or ""), "dp=1").config)
    init_rank(job, 0, 0, SignedStore(HashStore(), new_secret()))
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # a rank alone may be in its caller's process
    name_interface(job.config.cluster.interface)
    assert os.environ["GLOO_SOCKET_IFNAME"] == used
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker"  # the user's own word holds


def test_addresses_of_interfaces(train: Train, tmp_path: Path) -> None:
    assert address_of(None) == address_of(interface_of(None)) == LOOPBACK
    with pytest.raises(BadInput, match=r"no interface 'eth77'; it has .*\blo") as refused:
        train(cluster__interface="eth77")
    assert "--set cluster.interface=" in str(refused.value)
    assert not (tmp_path / "run").exists()


# Others who write to the store.


def test_a_stranger_in_the_store_changes_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user of this machine writes whatever was once believed, before the ranks come."""
    victim = tmp_path / "victim" / "thesis-1"
    victim.mkdir(parents=True)
    (victim / "text").write_text("all of it")
    real = rendezvous.open_store

    def watched(address: str, timeout: float) -> tuple[SignedStore, str, int]:
        store, address, port = real(address, timeout)
        stranger = TCPStore(address, port, is_master=False)
        failure = {"rank": 0, "message": "mine", "echo": False, "time": 0.0, "final": True}
        stranger.set("launcher", "x/../../../../victim/thesis")
        for key in ("stop", "fatal", "workers-1/regroup", "workers-1/stalled", "workers-1/failure-1"):
            stranger.set(key, json.dumps(failure))
        for number in range(1, 30):
            for kind in ("told", "first-rank-done", "gathered", "collector-1"):
                stranger.set(f"workers-1/{kind}-{number}", "memory 99")
            stranger.set(f"workers-1/gathered-{number}/1", "[[[[")
        for key in ("facts/0", "digest/0", "digest/1", "digest/1/0", "digest/1/1", "verdict"):
            stranger.set(f"workers-1/agreement/{key}", "{")
        for key in ("resumed", "trusted"):
            stranger.set(f"workers-1/{key}", "10000000000")
        stranger.set("agent-1/torchelastic/assigned_ranks/0", "[77, 78, 77, 78]")
        stranger.check(["stop"])
        return store, address, port

    monkeypatch.setattr(rendezvous, "open_store", watched)
    run = train(layout="dp=2", recipe__steps=6, checkpoint__every=1, checkpoint__keep=1)
    assert run.report.code == FINISHED, run.report.message
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    assert (victim / "text").read_text() == "all of it"
    assert [path.name for path in run.directory.checkpoints.iterdir()] == ["step-00000006"]


def test_a_secret_is_new_for_every_launch_and_not_shown() -> None:
    first, second = (LoopbackRendezvous("run", 5).store.secret for _ in range(2))
    assert len(first) == 32 and first != second
    job = resolve(load(None, [], "dp=1").config)
    shown = repr(Assignment("shoal.launch.worker:work", job, Path("run"), Path("data"), first, "0a0a0a0a-1"))
    assert repr(first) not in shown and first.hex() not in shown


# The environment.


def test_what_passes() -> None:
    passed = "PATH HOME LANG LC_ALL TZ PYTHONPATH OMP_NUM_THREADS CUDA_VISIBLE_DEVICES NCCL_DEBUG TORCH_LOGS "
    passed += (
        "PYTORCH_CUDA_ALLOC_CONF LD_LIBRARY_PATH XDG_CACHE_HOME SHOAL_CACHE HF_HOME TOKENIZERS_PARALLELISM "
    )
    passed += "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT"
    stays = "HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_PROFILE FSSPEC_S3_KEY GITHUB_TOKEN OPENAI_API_KEY SLURM_JWT "
    stays += "MY_VARIABLE SSH_AUTH_SOCK HTTPS_PROXY GOOGLE_APPLICATION_CREDENTIALS SHOAL_TOKEN WANDB_API_KEY"
    assert [name for name in passed.split() if not passes(name, Config())] == []
    assert [name for name in stays.split() if passes(name, Config())] == []


def test_credentials_pass_only_to_the_store_that_needs_them() -> None:
    def to(url: str) -> Config:
        return Config(checkpoint=CheckpointSection(to=url))

    aws, google = "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"
    for url, expected in {
        "s3://bucket/runs": {aws, "FSSPEC_S3_KEY", "HTTPS_PROXY"},
        "gs://bucket/runs": {google, "FSSPEC_S3_KEY", "HTTPS_PROXY"},
        "file:///a/b": set(),
        "unheard://of": {aws, google, "FSSPEC_S3_KEY", "HTTPS_PROXY"},
    }.items():
        names = [aws, google, "FSSPEC_S3_KEY", "HTTPS_PROXY", "GITHUB_TOKEN"]
        assert {name for name in names if passes(name, to(url))} == expected, url


def test_the_user_may_ask_for_more() -> None:
    config = Config(run=RunSection(environment=["MY_VARIABLE", "TEAM_*"]))
    assert passes("MY_VARIABLE", config) and passes("TEAM_TOKEN", config)
    assert not passes("MY_VARIABLE_TOO", config) and not passes("HF_TOKEN", config)
    environment = {
        "PATH": "p",
        "MY_VARIABLE": "m",
        "HF_TOKEN": "h",
        "OTHER": "o",
        LEFT_OUT: "BEFORE MY_VARIABLE",
    }
    assert keep_only_passed(config, environment) == ["BEFORE", "HF_TOKEN", "OTHER"]
    assert environment == {"PATH": "p", "MY_VARIABLE": "m", LEFT_OUT: "BEFORE HF_TOKEN OTHER"}


def test_the_launcher_keeps_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "kept")
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), passed_on():
        assert "HF_TOKEN" not in os.environ and "PATH" in os.environ and "HF_TOKEN" in os.environ[LEFT_OUT]
        raise ZeroDivisionError
    assert dict(os.environ) == before


# Secrets.

PEM_LINES = [
    "MIIEcanarycanarycanarycanarycanarycanarycanarycanarycanaryA1",
    "canaryBcanaryBcanaryBcanaryBcanaryB2",
]
CANARIES = {
    "HF_TOKEN": "hf_canaryAbCdEfGhIjKlMnOpQrSt0",
    "GITHUB_TOKEN": "ghp_canary0123456789abcdefABCDEF",
    "AWS_SECRET_ACCESS_KEY": "wJalr/canary/K7MDENG+bPxRfiCY",
    "MY_API_KEY": "canary-plain-1",
    "MY_PRIVATE_KEY": "\n".join(["-----BEGIN PRIVATE KEY-----", *PEM_LINES, "-----END PRIVATE KEY-----"]),
    "DATABASE_URL": "postgres://user:canary-in-url@db.example/x",
}
WITHOUT_A_NAME = "eyJhbGciOiJIUzI1NiJ9.eyJjYW5hcnkiOiJjYW5hcnkifQ.canarycanarycanary"
TOLD = [*CANARIES.values(), *PEM_LINES, "canary-in-url", WITHOUT_A_NAME]


def files_below(*places: Path) -> list[Path]:
    return [path for place in places for path in [place, *place.rglob("*")]]


@pytest.mark.long
def test_a_planted_secret_appears_in_no_artifact(settings: Callable[..., list[str]], tmp_path: Path) -> None:
    """Of a run whose rank prints all it knows, through Python and past it, and dies of it, twice."""
    stolen = tmp_path / "stolen"
    stolen.write_text(f"{CANARIES['AWS_SECRET_ACCESS_KEY']} {WITHOUT_A_NAME}")
    values = settings(
        recipe__steps=20,
        fault__max_restarts=1,
        checkpoint__memory=1,
        run__name=f"named after {CANARIES['MY_API_KEY']}",
        run__environment='["MY_*", "DATABASE_URL"]',
    )
    sets = [word for value in values for word in ("--set", value)]
    # The environment's values are known, so one in a config is not written either.
    words = ["train", "--run", str(tmp_path / "run"), "--layout", "dp=2", *sets]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.launch.leaking", *words],
        env={**os.environ, **CANARIES, leaking.STOLEN: str(stolen)},
        capture_output=True,
        timeout=120,
        umask=0,
    )
    assert ended.returncode == 1, ended.stderr
    run = RunDirectory(tmp_path / "run")
    copies = node_memory._root(run.id)
    try:
        assert run.memory().committed()
        for path in files_below(run.path, copies):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has {mode:o}"
            content = path.read_bytes() if path.is_file() else b""
            for canary in TOLD:
                assert canary.encode() not in content, f"{path} holds {canary}"
    finally:
        node_memory.forget(run.id)
    for canary in TOLD:
        assert canary.encode() not in ended.stdout + ended.stderr, canary
    # And yet they say what happened.
    said = "RuntimeError: cannot log in with [redacted], [redacted] [redacted]"
    assert said in ended.stderr.decode()
    rows = [json.loads(line) for line in run.faults.read_text().splitlines()]
    assert [row["rank"] for row in rows if said in row.get("message", "")] == [1, 1]
    log = run.log(1).read_text()
    assert log.count(said) == 2 and "ValueError: postgres://[redacted]@db.example/x" in log
    assert "the last words" in log and "what(): [redacted] [redacted]" in log
    assert "HF_TOKEN" in log  # by name, as one that was not passed on


@pytest.mark.parametrize(
    "setting",
    [
        "data.source=https://user:canary-pass@host/x.jsonl",
        "data.source=https://host/x.jsonl?X-Amz-Signature=canary-pass",
        "checkpoint.to=s3://key:canary-pass@bucket/x",
        'data.mix=[{source = "https://user:canary-pass@host/x"}]',
        "recipe.lr=https://user:canary-pass@host",
        "recipe.lr=" + "x" * 30 + "https://user:canary-pass-that-is-cut-off-here@host",
        "nothing.of=https://user:canary-pass@host",
        'run.environment=["MY_TOKEN=canary-pass"]',
        "MY_TOKEN:canary-pass",
    ],
)
def test_a_config_with_a_password_is_refused_and_not_quoted(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["train"], ["config", "show"], ["config", "show", "--json"]):
        with pytest.raises(SystemExit) as left:
            main([*words, "--set", setting])
        assert left.value.code == 2
    said = "".join(capfd.readouterr())
    assert "canary-pass" not in said and "fix: " in said
    assert list(tmp_path.iterdir()) == []


def test_what_the_terminal_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-plain-1")
    for words in (["config", "show"], ["config", "show", "--json"]):
        with pytest.raises(SystemExit) as left:
            main([*words, "--set", "run.name=canary-plain-1 and ghp_canary0123456789abcdefABCDEF"])
        assert left.value.code == 0
        shown = capsys.readouterr().out
        assert "canary" not in shown and "[redacted] and [redacted]" in shown

    def broken(*ignored: object) -> None:
        raise RuntimeError("no such key: canary-plain-1")

    monkeypatch.setattr("shoal.facts.config.file.load", broken)
    with pytest.raises(SystemExit) as left:
        main(["config", "show"])
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert "RuntimeError: no such key: [redacted]" in said and "canary" not in said


def test_logs_are_redacted_in_place_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-plain-1")
    monkeypatch.setattr("shoal.launch.redacted.BLOCK", 64)
    log = tmp_path / "rank-00000.log"
    lines = [f"step {number} loss {1 / (number + 1):.4f}\n".encode() for number in range(40)]
    lines[17] = b"\xff\xfe canary-plain-1 \x80\n"
    lines[30] = b"key canary-plain-1\n"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"".join(lines))
        redactor = LogRedactor()
        redactor.redact(tmp_path)
        lines[17], lines[30] = b"\xff\xfe [redacted] \x80\n", b"key [redacted]\n"
        assert log.read_bytes() == b"".join(lines)
        # Whoever still has it open goes on at its end.
        writer.write(b"more canary-plain-1 without an end")
        redactor.redact(tmp_path)
    assert log.read_bytes() == b"".join([*lines, b"more [redacted] without an end"])
    LogRedactor().redact(tmp_path / "nothing")


# Files, and what is run.


def test_a_finished_run_is_its_owners_alone(train: Train) -> None:
    before = os.umask(0)
    try:
        run = train(
            layout="dp=2", checkpoint__memory=1, run__observe=True, run__ledger=True, evaluate__samples=1
        )
    finally:
        os.umask(before)
    assert run.report.code == FINISHED, run.report.message
    found = files_below(run.directory.path)
    assert len(found) > 20
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in found}
    wrong = {
        path: oct(mode) for path, mode in modes.items() if mode != (0o700 if Path(path).is_dir() else 0o600)
    }
    assert wrong == {}


def test_memory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "SHARED_MEMORY", tmp_path)
    place = node_memory.memory_place("drawn").path.parent
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="belongs to another user"):
        node_memory.memory_place("drawn")
    place.unlink()
    place.mkdir()
    node_memory.memory_place("drawn")
    another = place.stat().st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    place.rename(node_memory.memory_place("drawn").path.parent)
    with pytest.raises(BadInput, match="belongs to another user"):
        node_memory.memory_place("drawn")


# Calls that run what they are given, each with where it may be and why.
DANGEROUS = {
    *(
        "eval",
        "exec",
        "os.system",
        "os.popen",
        "yaml.load",
        "yaml.unsafe_load",
        "marshal.loads",
        "shelve.open",
    ),
    *("dill.load", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"),
    # torch's own, which send pickles between ranks.
    *(
        "dist.gather_object",
        "dist.all_gather_object",
        "dist.broadcast_object_list",
        "dist.scatter_object_list",
    ),
}
ALLOWED = {
    ("cli/main.py", "exec"): "of an empty text: it clears what an interrupt has left in the interpreter",
    ("launch/ranks.py", "pickle.loads"): "from a process that we forked, through a pipe of our own",
    ("plan/search_process.py", "pickle.loads"): "from a process that we forked, through a pipe of our own",
    ("observe/nccl.py", "pickle.Unpickler"): "a subclass that refuses every class and function",
    # Ranks trust each other: docs/security.md says what that means for their network.
}


def test_nothing_runs_what_it_reads() -> None:
    source = Path(shoal.__file__).parent
    found = set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = node.func if isinstance(node, ast.Call) else node
            if isinstance(node, ast.Call):
                assert not any(word.arg == "shell" for word in node.keywords), f"{file}: a shell"
            elif not isinstance(node, ast.Attribute):
                continue
            name = ast.unparse(named)
            # numpy reads pickles only where it is told to.
            if name in DANGEROUS or "allow_pickle" in ast.unparse(node):
                found.add((str(file.relative_to(source)), name))
    assert found == set(ALLOWED)
