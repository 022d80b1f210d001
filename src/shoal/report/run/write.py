"""Write a run's report into the run directory, and say where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.facts.problem import BadInput
from shoal.report.run.report_page import report_page
from shoal.report.run.summary import RunSummary
from shoal.train.files import private_files, replace_text

REPORT = "report.html"


def write_report(paths: Sequence[Path], to: Path | None = None) -> tuple[Path, list[RunSummary]]:
    """Defaults to ``report.html`` in the run's directory; for several runs the caller chooses the path."""
    if to is None and len(paths) > 1:
        raise BadInput(
            "a report of several runs belongs to none of them", "--to FILE, such as --to runs.html"
        )
    target = to if to is not None else paths[0] / REPORT
    if target.is_dir():
        raise BadInput(f"--to {target}: it is a directory", f"--to {target / REPORT}")
    if not target.parent.is_dir() and to is not None:
        raise BadInput(f"--to {target}: there is no directory {target.parent}", "a directory that exists")
    text, found = report_page(paths)
    with private_files():  # it contains what the run directory contains
        try:
            replace_text(target, text)
        except OSError as error:
            raise BadInput(f"cannot write {target}: {error.strerror}", "--to FILE, elsewhere") from None
    return target, found
