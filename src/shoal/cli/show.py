"""What commands print in common."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(document: Any) -> None:
    """One JSON document on standard output, and nothing else there."""
    json.dump(document, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
