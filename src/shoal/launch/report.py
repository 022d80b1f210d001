"""How a call of ``shoal train`` ended, and its exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINISHED, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75


@dataclass(frozen=True)
class Report:
    """How a call of ``train`` ended."""

    code: int
    run: Path
    step: int
    message: str
    row: dict[str, Any] | None  # the last step's metrics
    heldout_loss: float | None
    skipped: int = 0  # updates of this call, for gradients that were not finite
    tuning: dict[str, Any] | None = None  # where layouts were tried: what that cost and gained
