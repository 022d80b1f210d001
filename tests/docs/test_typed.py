"""The public names in a user's script, as ``mypy --strict`` sees them from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from collections.abc import Sequence
from typing import Any, assert_type

import shoal
from shoal.plan.report import PlanReport

def train(run: shoal.Run) -> float:
    for batch in run.steps([1, 2], total=2):
        run.print(batch)
    assert_type(run.first, bool)
    return assert_type(run.mean(1.0, 2), float)

assert_type(shoal.__version__, str)
assert_type(shoal.launch(train, layout="dp=1", batch=8), list[Any])
assert_type(shoal.plan("tiny", on="8xH100", seq=128, batch=64), PlanReport)
assert_type(shoal.Layout.parse("fsdp=4,tp=2").replace(tp=1), shoal.Layout)
with shoal.run("dp=1", batch=4, clip=1.0) as run:
    assert_type(run, shoal.Run)
print(shoal.predict("tiny", "8xH100", "dp=8", seq=128, batch=64).step.seconds + 1.0)
names: Sequence[type[object]] = [shoal.Cluster, shoal.Model, shoal.BadInput]
shoal.plan(on=3)  # type: ignore[call-arg]
shoal.predict(1, 2)  # type: ignore[call-arg, arg-type]
shoal.launch()  # type: ignore[call-arg]
"""
# What others install is not what is asked about, and takes a while to read.
CONFIG = """
[mypy]
strict = True
[mypy-torch.*,numpy.*,pydantic.*]
follow_imports = skip
"""


def test_every_public_name_has_its_type(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
