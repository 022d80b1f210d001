"""A real Slurm of several nodes on this machine: its daemons in a network of their own, each ended by its process."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("ip", "unshare", "nsenter", "sbatch", "scontrol")
PACKAGES = ("slurm-wlm", "munge", "iproute2")
# The only interface beside loopback, for launchers and ranks: every node is called otherwise, and none is elsewhere.
INTERFACE = "fabric0"
# On a busy machine the daemons alone may take a minute.
SECONDS = 300.0


def install() -> str | None:
    """Install what is missing, where root may; what is missing then, in words."""

    def missing() -> list[str]:
        return [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=_path()) is None]

    if os.geteuid() != 0:
        return "nodes with names of their own need root"
    if missing() and shutil.which("apt-get"):
        words = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *PACKAGES]
        subprocess.run(words, capture_output=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    return f"not installed: {', '.join(missing())}" if missing() else None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class SlurmCluster:
    """``nodes`` of two cores and two devices each: n1, n2, …"""

    def __init__(self, place: Path, nodes: int) -> None:
        self.place, self.names = place, [f"n{number}" for number in range(1, nodes + 1)]
        self.namespace = f"shoal-slurm-{os.getpid()}"
        self._started: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        (place / "munge").mkdir(mode=0o711)
        for folder in ("spool", "state", "private"):
            (place / folder).mkdir()
        (place / "munge" / "key").write_bytes(secrets.token_bytes(128))
        (place / "munge" / "key").chmod(0o600)
        hosts = "".join(f"127.0.0.1 {name}\n" for name in (socket.gethostname(), *self.names))
        (place / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        (place / "slurm.conf").write_text(self._config())
        (place / "gres.conf").write_text("Name=gpu Type=fake Count=2 File=/dev/tty[0-1]\n")
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(place / "slurm.conf")}

    def _config(self) -> str:
        place = self.place
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={17001 + number} CPUs=2 RealMemory=4000 "
            f"Gres=gpu:fake:2 State=UNKNOWN"
            for number, name in enumerate(self.names)
        ]
        lines = {
            "ClusterName": "shoal",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # It also sets for how long a job that was put back waits.
            "AuthInfo": f"socket={place}/munge/sock,cred_expire=5",
            "SlurmctldPort": 16817,
            "SlurmdPort": 16818,
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "JobCompType": "jobcomp/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
            "ReturnToService": 0,
            "SlurmdTimeout": 30,
            "KillWait": 5,
            "JobRequeue": 1,
            "GresTypes": "gpu",
            "SlurmdParameters": "config_overrides",
            "MailProg": "/bin/true",
            "StateSaveLocation": place / "state",
            "SlurmdSpoolDir": place / "spool" / "%n",
            "SlurmctldPidFile": place / "slurmctld.pid",
            "SlurmdPidFile": place / "slurmd-%n.pid",
            "SlurmctldLogFile": place / "slurmctld.log",
            "SlurmdLogFile": place / "slurmd-%n.log",
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        partition = f"PartitionName=main Nodes={','.join(self.names)} Default=YES MaxTime=INFINITE State=UP"
        return text + "\n".join([*nodes, partition]) + "\n"

    def start(self) -> None:
        self._ip("netns", "add", self.namespace)
        inside = ("-n", self.namespace, "link")
        self._ip(*inside, "add", INTERFACE, "type", "veth", "peer", "name", "fabric1")
        self._ip("-n", self.namespace, "address", "add", "10.78.0.1/24", "dev", INTERFACE)
        for link in ("lo", INTERFACE, "fabric1"):
            self._ip(*inside, "set", link, "up")
        munge, config = self.place / "munge", str(self.place / "slurm.conf")
        files = {
            "key-file": "key",
            "socket": "sock",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={munge / file}" for option, file in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self._wait(lambda: (munge / "sock").exists(), "munge's socket")
        self._daemon("slurmctld", "-D", "-f", config)
        for name in self.names:
            self.start_node(name)
        self._wait(lambda: self.states() == dict.fromkeys(self.names, "idle"), "idle nodes")

    def start_node(self, name: str) -> None:
        """A host name and files of its own: ``private`` is another directory on every node but the first."""
        own = """hostname "$1"; mount --bind "$2/hosts" /etc/hosts
            [ "$1" = n1 ] || mount -t tmpfs none "$2/private"
            exec slurmd -D -f "$2/slurm.conf" -N "$1\""""
        words = ("unshare", "-m", "-u", "bash", "-c", own, "bash", name, str(self.place))
        self._nodes[name] = self._daemon(*words)

    def lose_node(self, name: str) -> None:
        """With all that runs on it, as if its power was cut: whatever has its host name."""
        mine = Path(f"/proc/{self._nodes[name].pid}/ns/uts").readlink()
        assert mine != Path("/proc/self/ns/uts").readlink()  # else that would be this machine
        for process in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process}/ns/uts").readlink() == mine:
                    os.kill(process, signal.SIGKILL)
        self._nodes[name].wait()
        self.set_node(name, "DOWN")

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.place / "daemons.log").open("ab") as log:
            command = [*self.enter, *words]
            self._started.append(
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=self.environment, start_new_session=True
                )
            )
        return self._started[-1]

    def stop(self) -> None:
        """All jobs, then all daemons: the namespace goes with the last of them."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--full", "--user", "root", check=False, timeout=10)
            self.run("scancel", "--signal=KILL", "--full", "--user", "root", check=False, timeout=10)
            self._wait(lambda: not self.run("squeue", "-h", timeout=10).stdout.strip(), "an empty queue", 20)
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)  # one that has ended already gets none
        for process in self._started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)

    @property
    def enter(self) -> list[str]:
        """``ip netns exec`` would mount another /sys, without control groups, which slurmd asks for."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    def run(self, *words: str, check: bool = True, timeout: float = SECONDS, **more: Any) -> Any:
        """A command of the cluster, as its user types it."""
        return subprocess.run(
            [*self.enter, *words],
            env={**self.environment, **more.pop("env", {})},
            check=check,
            timeout=timeout,
            capture_output=True,
            text=True,
            **more,
        )

    def states(self) -> dict[str, str]:
        found = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False).stdout.split()
        return dict(zip(found[::2], found[1::2], strict=True))

    def set_node(self, name: str, state: str) -> None:
        self.run("scontrol", "update", f"NodeName={name}", f"State={state}", "Reason=test")

    def _ip(self, *words: str) -> None:
        try:
            subprocess.run(["ip", *words], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this root may not make a network: {error.stderr.decode().strip()}")

    def _wait(self, condition: Any, what: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            log = (self.place / "daemons.log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, f"no {what}\n{log}"
            time.sleep(0.1)
