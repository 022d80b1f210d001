"""What a rank reports to its launcher; importable without the training code."""

from __future__ import annotations

from dataclasses import dataclass

# Keys of an attempt's store: the step it resumed from, and the step after which commits are in doubt.
RESUMED, TRUSTED = "resumed", "trusted"


@dataclass(frozen=True)
class Outcome:
    """How a rank's work ended."""

    stopped: bool  # on request, before the last step
    step: int  # the last completed step
