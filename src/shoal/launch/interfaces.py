"""The address that ranks listen on: loopback, or the interface that the config names. Never all interfaces."""

from __future__ import annotations

import socket
import struct
import sys

from shoal.facts.problem import BadInput, closest

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

# Linux's ioctl for the IPv4 address of an interface, whose name may have 15 characters.
SIOCGIFADDR = 0x8915
LONGEST_NAME = 15


def interface_of(interface: str | None) -> str:
    """The interface for gloo and NCCL: ``cluster.interface``, or loopback."""
    return LOOPBACK_INTERFACE if interface is None else interface


def address_of(interface: str | None) -> str:
    """The IPv4 address of an interface; loopback's by default."""
    if interface is None or interface == LOOPBACK_INTERFACE:
        return LOOPBACK
    there = [name for _, name in socket.if_nameindex()]
    if interface not in there:
        meant = closest(interface, there)
        raise BadInput(
            f"cluster.interface: this machine has no interface {interface!r}; it has {', '.join(there)}",
            f"--set cluster.interface={meant or there[-1]}",
        )
    address = _ask(interface)
    if address is None:
        others = [f"{name} ({found})" for name in there if (found := _ask(name)) is not None]
        raise BadInput(
            f"cluster.interface: {interface} has no IPv4 address; those that have one: {', '.join(others) or 'none'}",
            "choose one of them, or give it an address",
        )
    return address


def address_towards(host: str) -> str | None:
    """This machine's own address on the route to a host; None if there is no route, or no such host."""
    try:
        (*_, (address, *_)), *_ = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))  # sends nothing: the system only looks up the route
            return str(asking.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The interface through which this machine reaches a host; None if none is found."""
    address = address_towards(host)
    if address is None or sys.platform != "linux":
        return None
    if address.startswith("127."):
        return LOOPBACK_INTERFACE
    return next((name for _, name in socket.if_nameindex() if _ask(name) == address), None)


def _ask(interface: str) -> str | None:
    """The interface's address; None if it has none."""
    import fcntl

    if sys.platform != "linux":
        raise BadInput("cluster.interface: only Linux tells the address of an interface", "leave it out")
    request = struct.pack("256s", interface.encode()[:LONGEST_NAME])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
