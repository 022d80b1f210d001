"""What a rank reports to its launcher; importable without the training code."""

from __future__ import annotations

from dataclasses import dataclass

# Keys of an attempt's store: the step that it began from, and after which step commits are in doubt.
RESUMED, TRUSTED = "resumed", "trusted"


@dataclass(frozen=True)
class Outcome:
    """How a rank's work ended."""

    stopped: bool  # on request, before the last step
    step: int  # the last one done
