"""SageMaker's collectives (SMDDP) as a backend of torch's: in its containers, and nowhere else. Needs no torch."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

MODULE = "smdistributed.dataparallel.torch.torch_smddp"


def is_here() -> bool:
    try:
        return find_spec(MODULE) is not None
    except (ImportError, ValueError):  # the packages that it lies in are looked for, and imported
        return False


def register() -> None:
    """Importing it makes ``smddp`` known to torch."""
    importlib.import_module(MODULE)
