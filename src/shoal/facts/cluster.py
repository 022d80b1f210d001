"""Cluster: the hardware a run has. Written ``8xH100``, ``2x8xA100-80GB``, ``local``, or in a TOML file.

A file describes what the catalogue does not know. Everything but ``device`` has a default; what is left out
of a link keeps the device's value::

    device = "H100"            # a name of the catalogue, or a table [device]: name and memory_bytes, then as
                               # known peaks = {bf16 = 989e12}, memory_bandwidth, power and the other fields
                               # of facts.devices.Device
    nodes = 4                  # default 1
    devices_per_node = 8       # default: the device's
    fast_domain = 8            # devices that the fast link joins; default: the device's, 72 in an NVL72
    host_memory = 2e12         # bytes of memory of one node; default: unknown

    [fast]                     # bytes/s in one direction and seconds, for one device
    bandwidth = 450e9
    latency = 3e-6

    [network]
    bandwidth = 50e9
    latency = 5e-6
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from shoal.facts import devices
from shoal.facts.devices import Count, Device, Hardware, Link
from shoal.facts.problem import BadInput, Problem, did_you_mean

MOST_DEVICES = 10_000_000
FORMS = "8xH100, 2x8xA100-80GB (nodes x devices), 4xcpu, local, or the path of a .toml file"

_COUNT = r"([+-]?[\d.,_]+)\s*[x×]\s*"
_NOTATION = re.compile(rf"{_COUNT}(?:{_COUNT})?(.*)", re.IGNORECASE)


class Cluster(Hardware):
    """Devices of one kind in equal nodes. Links are for one device, in one direction."""

    name: str  # as the user wrote it
    device: Device
    nodes: Count
    devices_per_node: Count
    fast_domain: Count  # devices that the fast link joins, never more than there are; the last may be smaller
    fast: Link | None  # None: the devices of a node reach one another over device.host_link
    network: Link
    host_memory: Annotated[int, Field(gt=0)] | None = None  # bytes of one node

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def parse(cls, text: str, visible: str | None = None) -> Cluster:
        """A cluster as the user writes one. ``visible`` is CUDA_VISIBLE_DEVICES, for ``local`` alone."""
        text = text.strip()
        if text.lower() == "local":
            from shoal.facts import local  # it builds clusters itself, so it can only be imported late

            return local.look(visible)
        if text.lower().endswith(".toml"):
            return _from_file(text)
        notation = _NOTATION.fullmatch(text)
        if notation is None:
            device = devices.find(text)
            fix = f"say how many: 1x{device.name}" if device else FORMS
            raise BadInput(f"{text!r} is not a cluster", fix)
        return _from_notation(text, *notation.groups())

    def __str__(self) -> str:
        """The shortest notation that parses back to this cluster; its name where only that does."""
        device = self.device
        as_catalogued = (
            device == devices.find(device.name)
            and (self.fast, self.network, self.host_memory) == (device.fast, device.network, None)
            and self.fast_domain == _domain(device, self.nodes, self.devices_per_node)
        )
        if not as_catalogued:
            return self.name
        if self.devices_per_node == _default_per_node(device, self.devices):
            return f"{self.devices}x{device.name}"
        return f"{self.nodes}x{self.devices_per_node}x{device.name}"


def assemble(
    name: str,
    device: Device,
    nodes: int,
    devices_per_node: int,
    fast_domain: int | None = None,
    fast: Link | None = None,
    network: Link | None = None,
    host_memory: int | None = None,
) -> Cluster:
    """A cluster with the device's own links and domain wherever none are given."""
    if fast_domain is None and fast is not None and device.fast is None:
        fast_domain = devices_per_node  # a link the catalogue does not know: the usual one, within a node
    elif fast_domain is None:
        fast_domain = _domain(device, nodes, devices_per_node)
    cluster = Cluster(
        name=name,
        device=device,
        nodes=nodes,
        devices_per_node=devices_per_node,
        fast_domain=min(fast_domain, nodes * devices_per_node),
        fast=fast or device.fast,
        network=network or device.network,
        host_memory=host_memory,
    )
    if problems := _contradictions(cluster):
        raise BadInput(problems)
    return cluster


def _default_per_node(device: Device, count: int) -> int:
    """Devices in each node where the user only said how many there are."""
    return min(count, device.devices_per_node or count)


def _domain(device: Device, nodes: int, devices_per_node: int) -> int:
    """How far the fast link reaches: within the node, unless the device is built to reach beyond it."""
    beyond_the_node = device.devices_per_node is not None and device.fast_domain > device.devices_per_node
    return min(device.fast_domain, nodes * devices_per_node if beyond_the_node else devices_per_node)


def _contradictions(cluster: Cluster) -> list[Problem]:
    problems = []
    domain, per_node = cluster.fast_domain, cluster.devices_per_node
    if domain > 1 and cluster.fast is None:
        problems.append(
            Problem(
                f"{cluster.name}: a fast_domain of {domain} but no fast link",
                "add a table [fast] with bandwidth and latency, or set fast_domain = 1",
            )
        )
    if per_node % domain and domain % per_node:
        problems.append(
            Problem(
                f"{cluster.name}: nodes of {per_node} devices across fast-link domains of {domain}",
                f"nodes that divide {domain} or are a multiple of it, or a file with another fast_domain",
            )
        )
    if cluster.devices > MOST_DEVICES:
        problems.append(Problem(f"{cluster.name}: {cluster.devices} devices", f"at most {MOST_DEVICES}"))
    return problems


def _from_notation(text: str, first: str, second: str | None, device_name: str) -> Cluster:
    device = devices.find(device_name)
    written = {"devices": first} if second is None else {"nodes": first, "devices a node": second}
    problems = [
        Problem(f"{text!r}: {word!r} is not a number of {what}", f"a whole number from 1 to {MOST_DEVICES}")
        for what, word in written.items()
        if not _is_count(word)
    ]
    if device is None:
        what = f"there is no device {device_name!r}" if device_name else "the device is missing"
        problems.append(Problem(f"{text!r}: {what}", devices.nearest(device_name)))
    if problems or device is None:
        raise BadInput(problems)
    if second is not None:
        return assemble(text, device, nodes=int(first), devices_per_node=int(second))
    count = int(first)
    per_node = _default_per_node(device, count)
    if count % per_node:
        fewer = count - count % per_node
        part = max(size for size in range(1, per_node) if count % size == 0)
        raise BadInput(
            f"{text!r}: {count} devices do not fill nodes of {per_node}",
            f"{fewer}x{device.name} or {fewer + per_node}x{device.name}; "
            f"for nodes of another size say so: {count // part}x{part}x{device.name}",
        )
    return assemble(text, device, nodes=count // per_node, devices_per_node=per_node)


def _is_count(word: str) -> bool:
    # The length comes first because Python refuses to read endless numbers.
    return word.isdecimal() and len(word) <= 20 and 1 <= int(word) <= MOST_DEVICES


class _File(Hardware):
    """What a cluster file may hold besides its device."""

    nodes: Count = 1
    devices_per_node: Count | None = None
    fast_domain: Count | None = None
    fast: Link | None = None
    network: Link | None = None
    host_memory: Annotated[int, Field(gt=0)] | None = None


def _from_file(text: str) -> Cluster:
    try:
        table = tomllib.loads(Path(text).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"there is no cluster file {text}", FORMS) from None
    except (OSError, ValueError) as error:  # not there to read, not UTF-8, not TOML
        raise BadInput(
            f"cannot read {text}: {error}", 'a TOML file in UTF-8, such as: device = "H100"'
        ) from None
    problems: list[Problem] = []
    device = _device(text, table.pop("device", None), problems)
    for link, known in (("fast", device and device.fast), ("network", device and device.network)):
        if isinstance(table.get(link), dict):
            inherited = {"latency": known.latency, "bandwidth": known.bandwidth} if known else {}
            table[link] = {"kind": "described by the user", **inherited, **table[link]}
    try:
        file = _File.model_validate(table)
    except ValidationError as error:
        problems.extend(_explain(error, _File, text))
    if problems or device is None:
        raise BadInput(problems)
    per_node = file.devices_per_node or device.devices_per_node or 1
    return assemble(
        text, device, file.nodes, per_node, file.fast_domain, file.fast, file.network, file.host_memory
    )


def _device(path: str, written: Any, problems: list[Problem]) -> Device | None:
    """The device a file names or describes; what is wrong with it goes to ``problems``."""
    if isinstance(written, str):
        device = devices.find(written)
        if device is None:
            problems.append(Problem(f"{path}: there is no device {written!r}", devices.nearest(written)))
        return device
    if not isinstance(written, dict):
        problems.append(Problem(f"{path}: no device", 'device = "H100", or a table [device]'))
        return None
    try:
        return Device.model_validate(written)
    except ValidationError as error:
        problems.extend(_explain(error, Device, f"{path}: device"))
        return None


def _explain(error: ValidationError, schema: type[BaseModel], where: str) -> list[Problem]:
    """Pydantic's findings in words of ours, each with what would be right."""
    problems = []
    for finding in error.errors():
        path = [str(part) for part in finding["loc"]]
        key = ".".join(path)
        known = schema.model_fields if len(path) == 1 else Link.model_fields
        if finding["type"] == "extra_forbidden":
            problems.append(Problem(f"{where}: unknown key {key}", did_you_mean(path[-1], known)))
        elif finding["type"] == "missing":
            problems.append(Problem(f"{where}: {key} is missing", f"add a value for {key}"))
        else:
            problems.append(Problem(f"{where}: {key} = {finding['input']!r}", finding["msg"]))
    return problems
