"""Devices by name: the catalogue's entries, found however a person or a driver spells them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

# Who looks a device up also handles what it is made of.
from shoal.facts.cluster.datasheets import CPU as CPU
from shoal.facts.cluster.datasheets import DEVICES as DEVICES
from shoal.facts.cluster.device import GIB as GIB
from shoal.facts.cluster.device import Count as Count
from shoal.facts.cluster.device import Device as Device
from shoal.facts.cluster.device import Hardware as Hardware
from shoal.facts.cluster.device import Latency as Latency
from shoal.facts.cluster.device import Link as Link
from shoal.facts.cluster.device import Memory as Memory
from shoal.facts.cluster.device import Positive as Positive
from shoal.facts.cluster.device import Precision as Precision
from shoal.facts.cluster.device import Share as Share


def normalised(name: str) -> str:
    """A device's name without case, spaces and maker, so that a driver's spelling finds its entry."""
    words = name.lower().replace("_", "-").replace(" ", "-").strip("-")
    return words.removeprefix("nvidia-").removeprefix("amd-")


_BY_NAME: Mapping[str, Device] = {
    normalised(name): device for device in DEVICES for name in (device.name, *device.aliases)
}


def find(name: str) -> Device | None:
    """The entry of that name or alias, in any case and as drivers spell it; None where there is none."""
    return _BY_NAME.get(normalised(name))


ALIKE = str.maketrans("oil", "011")


def unknown(name: str) -> tuple[str, str]:
    """For a name that is not found: what is wrong with it, and what would put it right.

    An entry is suggested where its name was begun or is written differently, never where it only looks alike: a plan
    for another device would be off by as much as they differ.
    """
    catalogue = f"known: {', '.join(device.name for device in DEVICES)}"
    words = normalised(name)
    if not words:
        return "the device is missing", f"{catalogue}; or describe it in a TOML file"
    # notation.py has all that may stand in such a file.
    described = (
        "describe it in a cluster TOML, with its datasheet's numbers in place of these: "
        f"device = {{name = {json.dumps(name.strip())}, memory_bytes = 32e9, peaks = {{bf16 = 100e12}}}}"
    )
    family = re.match(r"[a-z]+-?[0-9]+", words)
    entries = {normalised(device.name): device.name for device in DEVICES}
    relatives = [entry for key, entry in entries.items() if family and key.split("-")[0] == family[0]]
    begun = [
        entry for key, entry in entries.items() if key.startswith(words) and _letters(key) == _letters(words)
    ]
    # A letter for the digit that looks like it is no other device.
    alike = [entry for key, entry in entries.items() if key.translate(ALIKE) == words.translate(ALIKE)]
    for meant in (begun, alike):
        if len(meant) == 1:
            return f"there is no device {name!r}", f"did you mean {meant[0]!r}?"
    if relatives:
        return (
            f"there is no device {name!r}",
            f"of its kind the catalogue has {', '.join(relatives)}; or {described}",
        )
    return f"the device {name!r} is not in the catalogue", f"{described}; {catalogue}"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name)
