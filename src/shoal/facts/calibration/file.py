"""Calibrations on disk: one JSON file per kind of device, in ``calibration/`` of Shoal's cache.

Links have files of their own in ``calibration/links/``: ``shoal profile --calibrate`` and ``shoal bench comm`` both
measure them, and the latest measurement counts. ``shoal tune`` keeps measured steps in ``calibration/steps/``.

Predictions read none of these by themselves. A command that predicts calls ``use`` at its start, once in every
predicting process; from then on ``calibration.find`` returns the stored rates. A library or a test that does not call
it predicts the same on every machine.
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
    """The contents of a file: measurements, and the general model's rates fitted to them."""

    format: int
    measured: Measurements
    device: DeviceRates
    fast: LinkRates | None  # None: no peer to send to, so the built-in rates remain
    host: LinkRates | None

    def calibration(self, path: Path) -> Calibration:
        device, known = self.device, calibration.known_rates(self.measured.device)
        if known is not None and device.flash == device.fused:
            # Written when attention had a single kernel; windows and documents have used another since.
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
    """The latest measurements between devices of one kind."""

    format: int
    device: str
    fast: LinkRates | None = None  # within a node
    network: LinkRates | None = None  # between nodes


File = TypeVar("File", Stored, StoredLinks, StoredSteps)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The cache directory. Only this function reads SHOAL_CACHE."""
    return Path(environment.get(VARIABLE) or DEFAULT).expanduser()


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    return cache_folder(environment) / "calibration"


def file_of(folder: Path, device: str) -> Path:
    """A device kind's file; characters that a file name cannot have become dashes."""
    return folder / (re.sub(r"[^A-Za-z0-9._-]+", "-", device).strip("-.") + ".json")


def read(path: Path) -> Stored:
    """Raises a one-line ``ValueError`` if the file is not a calibration that this version knows."""
    return _checked(path, Stored, lambda stored: stored.measured.device)


def links_file(folder: Path, device: str) -> Path:
    return file_of(folder / "links", device)


def read_links(path: Path) -> StoredLinks:
    """Raises ``ValueError`` like ``read``."""
    return _checked(path, StoredLinks, lambda stored: stored.device)


def steps_file(folder: Path, device: str) -> Path:
    return file_of(folder / "steps", device)


def read_steps(path: Path) -> StoredSteps:
    """Raises ``ValueError`` like ``read``."""
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
    """The contents of a device kind's link file after setting ``kind`` ("fast" or "network") to these rates."""
    try:
        before = read_links(links_file(folder, device))
    except ValueError:  # missing or unusable: it is replaced
        before = StoredLinks(format=FORMAT, device=device)
    return before.model_copy(update={kind: rates})


def use(folder: Path | None) -> list[str]:
    """Make predictions use what is stored in this folder, and nothing else; None: built-in rates only.

    Returns a warning, with a fix, for each unusable file; there the built-in rates remain.
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
