"""``shoal doctor``: is this machine ready to train?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def doctor(*, run: Path = Path("runs"), json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Check whether this machine is ready to train: versions, devices, links, ports, disk, limits.

    Example: shoal doctor

    Parameters
    ----------
    run
        The directory for runs; its file system is checked.
    json
        Print one JSON document.
    """
    from dataclasses import asdict

    from shoal.cli.show import print_json
    from shoal.launch.doctor import examine

    checks = examine(run, os.environ.get("CUDA_VISIBLE_DEVICES"))
    failed = any(check.status == "failed" for check in checks)
    if json:
        print_json({"ready": not failed, "checks": [asdict(check) for check in checks]})
        return int(failed)
    from shoal.launch.screen import Console

    console = Console(highlight=False, soft_wrap=True)
    for check in checks:
        console.print(f"{check.status:<8} {check.name}: {check.detail}", markup=False)
        if check.fix and check.status != "ok":
            console.print(f"         fix: {check.fix}", markup=False)
    console.print("not ready: see the failed checks above" if failed else "ready to train: try shoal train")
    return int(failed)
