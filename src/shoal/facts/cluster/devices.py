"""Devices by name: the catalogue's entries, found under any spelling by users or drivers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

# Re-exported: callers that look devices up also use these.
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
    """A device's name without case, spaces and vendor, so that a driver's spelling finds its entry."""
    words = name.lower().replace("_", "-").replace(" ", "-").strip("-")
    return words.removeprefix("nvidia-").removeprefix("amd-")


_BY_NAME: Mapping[str, Device] = {
    normalised(name): device for device in DEVICES for name in (device.name, *device.aliases)
}


def find(name: str) -> Device | None:
    """The entry with that name or alias, in any case and in drivers' spelling, or None."""
    return _BY_NAME.get(normalised(name))


ALIKE = str.maketrans("oil", "011")


def unknown(name: str) -> tuple[str, str]:
    """For an unknown name: the problem and its fix.

    An entry is suggested if the name is its beginning or another spelling of it, never if it only looks similar: a
    plan for another device would be wrong by the difference between them.
    """
    catalogue = f"known: {', '.join(device.name for device in DEVICES)}"
    words = normalised(name)
    if not words:
        return "the device is missing", f"{catalogue}; or describe it in a TOML file"
    # notation.py describes everything that may be in such a file.
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
    # A letter in place of a similar-looking digit still means the same device.
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
