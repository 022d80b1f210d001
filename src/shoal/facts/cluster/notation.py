"""Parse a cluster as the user writes it: ``8xH100``, ``2x8xA100-80GB``, ``2xp5.48xlarge``, ``local`` or a TOML file.

``64xH100@4x200`` says that a node has 4 network adapters of 200 Gb/s; ``@200``, one.

A file describes what the catalogue does not know. Everything but ``device`` has a default; what is left out of a link
keeps the device's value::

    device = "H100"            # a name of the catalogue, or a table [device]: name and memory_bytes, then as
                               # known peaks = {bf16 = 989e12}, memory_bandwidth, power and the other fields
                               # of facts.devices.Device
    nodes = 4                  # default 1
    devices_per_node = 8       # default: the device's
    fast_domain = 8            # devices that the fast link joins; default: the device's, 72 in an NVL72
    host_memory = 2e12         # bytes of memory of one node; default: 256 GiB per device, 128 of an RTX card
    host_bandwidth = 400e9     # bytes/s of it that an optimizer on all cores reaches; default: facts.calibration
    nvme = 30e12               # bytes of local disks of one node; default: 3.84 TB per device
    nics = 4                   # network adapters of one node; default: one per device, or the device's where there is
                               # no table [network]
    across_rails = 0.5         # of a node's bandwidth, what the fabric carries between different adapters; default 1

    [fast]                     # bytes/s in one direction and seconds, for one device
    bandwidth = 450e9
    latency = 3e-6

    [network]                  # the same for one adapter
    bandwidth = 50e9
    latency = 5e-6
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.facts.cluster import (
    MOST_DEVICES,
    Cluster,
    assemble,
    clouds,
    default_per_node,
    devices,
    this_machine,
)
from shoal.facts.cluster.devices import Count, Device, Hardware, Link, Memory, Positive, Share
from shoal.facts.input.untrusted_files import parse_toml, read_settings
from shoal.facts.problem import BadInput, Problem, did_you_mean

FORMS = (
    "8xH100, 2x8xA100-80GB (nodes x devices), 64xH100@4x200 (adapters x Gb/s of a node), 2xp5.48xlarge (a cloud's "
    "instances), 4xcpu, local, or the path of a .toml file"
)

_COUNT = r"([+-]?[\d.,_]+)\s*[x×]\s*"
_NOTATION = re.compile(rf"{_COUNT}(?:{_COUNT})?(.*)", re.IGNORECASE)
_ADAPTERS = re.compile(
    r"(?:(\d{1,4})\s*[x×]\s*)?(\d{1,6}(?:\.\d{1,3})?)\s*(?:G|Gb|Gb/s|Gbps)?", re.IGNORECASE
)


def find(text: str, visible: str | None = None) -> Cluster:
    """Parse a cluster as the user writes it. ``visible``: CUDA_VISIBLE_DEVICES, for ``local`` alone."""
    text = text.strip()
    if text.lower() == "local":
        return this_machine.look(visible)
    if text.lower().endswith(".toml"):
        return _from_file(text)
    written, at, adapters = text.partition("@")
    if at:
        return _with_adapters(text, find(written, visible), adapters)
    if clouds.find(text) is not None:
        return _from_cloud(text, "1", text)
    notation = _NOTATION.fullmatch(text)
    if notation is None:
        device = devices.find(text)
        fix = f"say how many: 1x{device.name}" if device else FORMS
        raise BadInput(f"{text!r} is not a cluster", fix)
    return _from_notation(text, *notation.groups())


def _with_adapters(text: str, cluster: Cluster, adapters: str) -> Cluster:
    """``4x200``: four adapters of 200 Gb/s in every node."""
    found = _ADAPTERS.fullmatch(adapters.strip())
    count, gigabits = (int(found[1] or 1), float(found[2])) if found else (0, 0.0)
    if not count or not gigabits:
        raise BadInput(
            f"{text!r}: {adapters!r} is no network", "adapters x Gb/s of one node, as in 64xH100@8x400"
        )
    known = cluster.network
    kind = f"{known.kind.split()[0]} {gigabits:g} Gb/s"
    network = known.model_copy(update={"kind": kind, "bandwidth": gigabits * clouds.GIGABIT})
    return cluster.model_copy(update={"name": text, "network": network, "nics": count})


def _from_cloud(text: str, nodes: str, name: str) -> Cluster:
    instance = clouds.find(name)
    device = devices.find(instance.device) if instance else None
    if instance is None or device is None or not _is_count(nodes):
        raise BadInput(f"{text!r}: {nodes!r} is not a number of instances", f"1 to {MOST_DEVICES}: 2x{name}")
    # An instance with more devices than the usual node still has them on one switch.
    domain = instance.devices if device.fast and instance.devices > device.fast_domain > 2 else None
    network, nics = instance.network, instance.nics
    return assemble(text, device, int(nodes), instance.devices, domain, network=network, nics=nics)


def _from_notation(text: str, first: str, second: str | None, device_name: str) -> Cluster:
    if (instance := clouds.find(device_name)) is not None:
        if second is None:
            return _from_cloud(text, first, device_name)
        raise BadInput(f"{text!r}: {device_name} has {instance.devices} devices", f"{first}x{device_name}")
    device = devices.find(device_name)
    written = {"devices": first} if second is None else {"nodes": first, "devices a node": second}
    problems = [
        Problem(f"{text!r}: {word!r} is not a number of {what}", f"a whole number from 1 to {MOST_DEVICES}")
        for what, word in written.items()
        if not _is_count(word)
    ]
    if device is None and (relatives := clouds.relatives(device_name)):
        what = f"{text!r}: there is no instance {device_name.strip()!r} in the catalogue"
        problems.append(Problem(what, f"known of its family: {', '.join(relatives)}"))
    elif device is None:
        what, fix = devices.unknown(device_name)
        problems.append(Problem(f"{text!r}: {what}", fix))
    if problems or device is None:
        raise BadInput(problems)
    if second is not None:
        return assemble(text, device, nodes=int(first), devices_per_node=int(second))
    count = int(first)
    per_node = default_per_node(device, count)
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
    # The length comes first because Python refuses to parse very long numbers.
    return word.isdecimal() and len(word) <= 20 and 1 <= int(word) <= MOST_DEVICES


class _File(Hardware):
    """The contents of a cluster file besides its device."""

    nodes: Count = 1
    devices_per_node: Count | None = None
    fast_domain: Count | None = None
    fast: Link | None = None
    network: Link | None = None
    host_memory: Memory | None = None
    host_bandwidth: Positive | None = None
    nvme: Memory | None = None
    nics: Count | None = None
    across_rails: Share = 1.0


def _from_file(text: str) -> Cluster:
    try:
        table = parse_toml(read_settings(Path(text)))
    except FileNotFoundError:
        raise BadInput(f"there is no cluster file {text}", FORMS) from None
    except (OSError, ValueError) as error:  # unreadable, not UTF-8, not TOML
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
        text,
        device,
        file.nodes,
        per_node,
        file.fast_domain,
        file.fast,
        file.network,
        file.host_memory,
        file.host_bandwidth,
        file.nvme,
        file.nics,
        file.across_rails,
    )


def _device(path: str, written: Any, problems: list[Problem]) -> Device | None:
    """The device that a file names or describes; its errors are added to ``problems``."""
    if isinstance(written, str):
        device = devices.find(written)
        if device is None:
            what, fix = devices.unknown(written)
            problems.append(Problem(f"{path}: {what}", fix))
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
    """pydantic's errors in our words, each with its fix."""
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
