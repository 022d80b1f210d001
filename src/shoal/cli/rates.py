"""Whether a command predicts with rates measured on this machine or with the built-in ones."""

from __future__ import annotations

import sys

from shoal.facts import calibration, calibrationfile
from shoal.facts.cluster import Cluster


def use_calibration(wanted: bool = True) -> None:
    """To be called before anything is predicted. A file that cannot be used is a warning, with what to do."""
    folder = calibrationfile.default_folder() if wanted else None
    for warning in calibrationfile.use(folder):
        print(f"warning: {warning}", file=sys.stderr)


def measured_rates(cluster: Cluster) -> str | None:
    """One line for a person; None where nothing was measured."""
    found = calibration.find(cluster)
    return f"rates: {found.words}; --no-calibration ignores them" if found.measured is not None else None
