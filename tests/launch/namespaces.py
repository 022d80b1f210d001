"""Machines that are namespaces of the network: what needs several hosts, on one, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class NoNetwork(Exception):
    """Why there are none."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def shape(namespace: str, rate: str, device: str = "eth0") -> None:
    """Let what leaves a machine pass at a rate such as ``200mbit``."""
    words = ["qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
    subprocess.run(["tc", "-n", namespace, *words], check=True, capture_output=True)


def torchrun(node: int, network: str, port: int, *words: str) -> list[str]:
    """What follows ``python -m`` on each of two machines: torchrun with one rank; then further options, a command."""
    place = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    meeting = ["--master-addr", f"{network}.1", "--master-port", str(port)]
    return ["torch.distributed.run", *place, *meeting, *words]


@contextmanager
def joined(nodes: Sequence[str], network: str) -> Iterator[dict[str, str]]:
    """The namespace of each node, whose eth0 is ``network``.1, .2, …: two share a cable, more a switch."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNetwork("a network of one's own needs root, and iproute2")
    names = {node: f"shoal-{node}-{os.getpid()}" for node in nodes}
    switch = f"shoal-switch-{os.getpid()}"
    made = [*names.values(), *([switch] if len(names) > 2 else [])]
    try:
        try:
            for name in made:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode().strip()
            raise NoNetwork(f"this root may not make a network: {why}") from None
        _wire([*names.values()], switch)
        for number, name in enumerate(names.values(), 1):
            ip("-n", name, "address", "add", f"{network}.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _wire(names: list[str], switch: str) -> None:
    if len(names) == 2:
        first, second = names
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        return
    ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge", "up")
    for number, name in enumerate(names, 1):
        port = f"port{number}"
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        ip("-n", switch, "link", "set", port, "master", "bridge", "up")
