"""Machines for tests of launchers: network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def star() -> Iterator[dict[str, str]]:
    """Three machines on one switch, 10.79.0.1 to 3; a fourth namespace is the switch."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network of one's own needs root, and iproute2")
    names = {node: f"shoal-{node}-{os.getpid()}" for node in "abc"}
    switch = f"shoal-switch-{os.getpid()}"
    try:
        try:
            for name in (*names.values(), switch):
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this root may not make a network: {error.stderr.decode().strip()}")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names.values(), 1):
            port = f"port{number}"
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.79.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in (*names.values(), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """Two namespaces of the network as machines, joined by a cable: the name of each by its node's."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network of one's own needs root, and iproute2")
    names = {node: f"shoal-{node}-{os.getpid()}" for node in "ab"}
    try:
        try:
            for name in names.values():
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this root may not make a network: {error.stderr.decode().strip()}")
        first, second = names.values()
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, name in enumerate(names.values(), 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
