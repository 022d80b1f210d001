"""A network of a run's own, that can be cut: a Linux network namespace with nothing but a loopback. Needs root.

All that ranks and their launcher tell each other goes over it. While it is down nothing arrives and nobody is told, as
when a cable is pulled: connections stay open and silent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

# Linux's numbers: a namespace of the network, an interface's flags, and that it is up.
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


def possible() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and _may_unshare()


def own_network() -> None:
    """Give this process, and those that it starts, a network of their own."""
    _call("unshare", CLONE_NEWNET)
    _loopback(up=True)


def cut(process: int, seconds: float) -> None:
    """Cut the network of a process and, after a while, mend it. From a process of its own, for that has to enter it."""
    command = [sys.executable, "-m", "shoal.prove.chaos.network", str(process), str(seconds)]
    subprocess.run(command, check=True)


def _may_unshare() -> bool:
    """Root of a container may be refused."""
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


def _cut_and_mend(process: int, seconds: float) -> None:
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        _call("setns", namespace.fileno(), CLONE_NEWNET)
    _loopback(up=False)
    try:
        time.sleep(seconds)
    finally:
        _loopback(up=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        _cut_and_mend(int(sys.argv[1]), float(sys.argv[2]))
    else:
        own_network()
