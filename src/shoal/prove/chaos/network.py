"""A network that can be cut: a Linux network namespace with only a loopback. Needs root.

Ranks and their launcher communicate only through it. While it is down nothing arrives and no error is raised, as when a
cable is pulled: connections stay open and silent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Linux constants: a network namespace, an interface's flags, and that it is up.
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


def possible() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and _may_unshare()


def own_network() -> None:
    """Give this process, and those that it starts, a separate network."""
    _call("unshare", CLONE_NEWNET)
    _loopback(up=True)


@contextmanager
def cut(process: int) -> Iterator[None]:
    """Inside the context, a process's network is cut, by a helper process that has to enter its namespace."""
    command = [sys.executable, "-m", "shoal.prove.chaos.network", str(process)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cutting:
        assert cutting.stdout is not None
        if not cutting.stdout.readline():
            raise subprocess.CalledProcessError(cutting.wait(), command)
        yield


def _may_unshare() -> bool:
    """Whether this is permitted: root of a container may be refused."""
    command = [sys.executable, "-m", "shoal.prove.chaos.network"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _loopback(up: bool) -> None:
    request = struct.pack("16sh", b"lo", IFF_UP if up else 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking.fileno(), SIOCSIFFLAGS, request)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _cut_and_mend(process: int) -> None:
    """Cut the network until standard input is closed, however the caller ended."""
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        _call("setns", namespace.fileno(), CLONE_NEWNET)
    _loopback(up=False)
    try:
        print("cut", flush=True)
        sys.stdin.read()
    finally:
        _loopback(up=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        _cut_and_mend(int(sys.argv[1]))
    else:
        own_network()
