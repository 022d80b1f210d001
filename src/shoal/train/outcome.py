"""What a rank tells its launcher. A launcher reads it without importing what trains, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

# Keys of an attempt's store: the step that it began from, and after which step commits are in doubt.
RESUMED, TRUSTED = "resumed", "trusted"


@dataclass(frozen=True)
class Outcome:
    """How a rank's work ended."""

    stopped: bool  # on request, before the last step
    step: int  # the last one done
