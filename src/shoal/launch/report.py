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
    skipped: int = 0  # updates skipped in this call because of non-finite gradients
    tuning: dict[str, Any] | None = None  # if layouts were tried: the cost and the gain
