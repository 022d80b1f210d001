"""``shoal report``: a run directory as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def report(
    run: Path,
    /,
    *others: Path,
    to: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write what a run directory holds as one HTML file: curves, faults, memory, time, traffic, data, samples.

    Example: shoal report runs/tiny

    Example: shoal report runs/tiny runs/tiny-dp2 --to compared.html

    The file loads nothing from the network. shoal train writes it at the end of every run, too; of a run that is
    going on it shows what is recorded so far. Every figure names the file and field it was drawn from: docs/report.md.

    Parameters
    ----------
    run
        The run directory.
    others
        More runs, to show side by side; --to then names the file.
    to
        The file to write; by default report.html in the run directory.
    json
        Print one JSON document on standard output: the file, and every run in numbers.
    """
    from shoal.cli.show import print_json
    from shoal.report.run.write import write_report

    target, found = write_report([run, *others], to)
    if json:
        print_json({"report": str(target), "runs": [one.as_json() for one in found]})
        return 0
    print(f"wrote {target}")
    return 0
