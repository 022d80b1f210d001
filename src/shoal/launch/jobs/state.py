"""States of a job: one vocabulary for all engines."""

from __future__ import annotations

from dataclasses import dataclass

PENDING, RUNNING = "pending", "running"
FINISHED, FAILED, CANCELLED, STOPPED, UNKNOWN = "finished", "failed", "cancelled", "stopped", "unknown"
OVER = (FINISHED, FAILED, CANCELLED, STOPPED, UNKNOWN)


@dataclass(frozen=True)
class JobState:
    """An engine's report on a job."""

    state: str
    detail: str = ""  # the engine's own words
    nodes: str = ""
    restarts: int = 0
    exit_code: int | None = None

    @property
    def over(self) -> bool:
        return self.state in OVER


def ended(code: int, asked: bool) -> str:
    """The state after ``shoal train`` exits with ``code``; ``asked``: it was cancelled."""
    from shoal.launch import report

    if code == report.FINISHED:
        return FINISHED
    if code == report.STOPPED:
        return CANCELLED if asked else STOPPED
    return FAILED
