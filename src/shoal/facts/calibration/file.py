"""Measured calibrations on disk: one JSON file per kind of device in ``calibration/`` of Shoal's cache.

Links have files of their own in ``calibration/links/``: ``shoal profile --calibrate`` and ``shoal bench comm`` both
measure them, and what was measured last counts. ``shoal tune`` keeps whole steps in ``calibration/steps/``.

Predictions read none of these by themselves. A command that predicts calls ``use`` at its start, once in every
process that predicts; from then on ``calibration.find`` knows what the files say. A library or a test that does not
call it predicts the same on every machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from shoal.facts import calibration
from shoal.facts.calibration import Calibration, DeviceRates, LinkRates, steps
from shoal.facts.calibration.measurements import Measurements
from shoal.facts.calibration.steps import StoredSteps
from shoal.facts.cluster.devices import Hardware
from shoal.facts.input.untrusted_files import first_fault, read_bytes

FORMAT = 1
VARIABLE = "SHOAL_CACHE"
DEFAULT = "~/.cache/shoal"


class Stored(Hardware):
    """What a file holds: measurements, and the rates of the general model that were fitted to them."""

    format: int
    measured: Measurements
    device: DeviceRates
    fast: LinkRates | None  # None: nothing to send to, so the built-in rates remain
    host: LinkRates | None

    def calibration(self, path: Path) -> Calibration:
        device, known = self.device, calibration.known_rates(self.measured.device)
        if known is not None and device.flash == device.fused:
            # Written when attention had one kernel: windows and documents have another by now.
            device = device.model_copy(update={"flash": known.flash_beside(device.fused)})
        return Calibration(
            device=device,
            fast=self.fast or calibration.FAST,
            network=calibration.NETWORK,
            host=self.host or calibration.HOST,
            known=True,
            measured=self.measured,
            path=str(path),
        )


class StoredLinks(Hardware):
    """What was last measured between devices of one kind."""

    format: int
    device: str
    fast: LinkRates | None = None  # within a node
    network: LinkRates | None = None  # between nodes


File = TypeVar("File", Stored, StoredLinks, StoredSteps)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The one place where SHOAL_CACHE is read."""
    return Path(environment.get(VARIABLE) or DEFAULT).expanduser()


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    return cache_folder(environment) / "calibration"


def file_of(folder: Path, device: str) -> Path:
    """A device kind's file; a name that a file cannot have is written with dashes."""
    return folder / (re.sub(r"[^A-Za-z0-9._-]+", "-", device).strip("-.") + ".json")


def read(path: Path) -> Stored:
    """Raises ``ValueError`` in one line where the file is not a calibration that this version knows."""
    return _checked(path, Stored, lambda stored: stored.measured.device)


def links_file(folder: Path, device: str) -> Path:
    return file_of(folder / "links", device)


def read_links(path: Path) -> StoredLinks:
    """Raises ``ValueError`` as ``read`` does."""
    return _checked(path, StoredLinks, lambda stored: stored.device)


def steps_file(folder: Path, device: str) -> Path:
    return file_of(folder / "steps", device)


def read_steps(path: Path) -> StoredSteps:
    """Raises ``ValueError`` as ``read`` does."""
    return _checked(path, StoredSteps, lambda stored: stored.device)


def _checked(path: Path, kind: type[File], device_of: Callable[[File], str]) -> File:
    try:
        stored = kind.model_validate_json(read_bytes(path))
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if stored.format != FORMAT:
        raise ValueError(f"format {stored.format}, this version of Shoal reads {FORMAT}")
    if file_of(path.parent, device := device_of(stored)) != path:
        raise ValueError(f"is about {device}, which its name does not say")
    return stored


def with_link(folder: Path, device: str, kind: str, rates: LinkRates) -> StoredLinks:
    """What a device kind's file of links holds once ``kind`` ("fast" or "network") has these rates."""
    try:
        before = read_links(links_file(folder, device))
    except ValueError:  # none, or none that can be used: it is replaced
        before = StoredLinks(format=FORMAT, device=device)
    return before.model_copy(update={kind: rates})


def use(folder: Path | None) -> list[str]:
    """Let predictions use what is stored in this folder, and nothing else; None: built-in rates alone.

    Returns a warning, with what to do, for each file that cannot be used. There the built-in rates remain.
    """
    calibration.forget()
    warnings = []
    for path in sorted((folder / "steps").glob("*.json")) if folder is not None else ():
        try:
            steps.install(read_steps(path))
        except ValueError as error:
            warnings.append(
                f"measured steps {path} are not used: {error}; run shoal tune, or delete the file"
            )
    for path in sorted((folder / "links").glob("*.json")) if folder is not None else ():
        try:
            links = read_links(path)
        except ValueError as error:
            warnings.append(f"links {path} are not used: {error}; run shoal bench comm, or delete the file")
        else:
            calibration.install_links(links.device, links.fast, links.network, str(path))
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        try:
            stored = read(path)
        except ValueError as error:
            warnings.append(
                f"calibration {path} is not used: {error}; run shoal profile --calibrate, or delete the file"
            )
        else:
            calibration.install(stored.measured.device, stored.calibration(path))
    return warnings
