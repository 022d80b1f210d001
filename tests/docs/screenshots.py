"""Pictures of real pages for the README and docs/report.md: ``python -m tests.docs.screenshots [FOLDER]``.

Trains a small model in two ranks, kills one of them on the way, plans a model on a cluster, watches the run, and has
Chromium photograph what a reader would see. The run stays in FOLDER (by default a temporary one). Takes a few minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.docs.pictures import FOLDER
from tests.report.browser import DESK, OpenPage, address, chromium

from shoal.observe.flight_recorder import FlightReader
from shoal.report.watch.follow import RunFollower
from shoal.report.watch.web import WatchServer
from shoal.train.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
SHOAL = (sys.executable, "-m", "shoal")
STEPS, KILLED_AT = 80, 30
TRAIN = (
    *("train", str(ROOT / "examples" / "tiny.toml"), "--layout", "dp=2"),
    *("--set", "cluster.share=true", "--set", "run.observe=true", "--set", f"recipe.steps={STEPS}"),
    *("--set", "evaluate.every=10", "--set", "checkpoint.every=10"),
)
PLAN = (
    "plan",
    "llama3-8b",
    "--on",
    "64xH100",
    "--seq",
    "8192",
    "--batch",
    "512",
    "--tokens",
    "1T",
    "--price",
    "2.5",
)


def trained(run: Path) -> None:
    """A run with a fault: its second rank is killed, and it goes on from its last checkpoint."""
    with subprocess.Popen([*SHOAL, *TRAIN, "--run", str(run)], stderr=subprocess.DEVNULL) as launcher:
        flight = FlightReader(RunDirectory(run).flight(1))
        seen = None
        while launcher.poll() is None and (seen is None or seen.step < KILLED_AT):
            time.sleep(0.05)
            seen = flight.look()
        assert seen is not None
        os.kill(seen.pid, signal.SIGKILL)
        assert launcher.wait(600) == 0


def kept(browser: Any, place: str, name: str, high: int, scheme: str = "light") -> None:
    """Of the top of a page, as wide as a desk."""
    context = browser.new_context(viewport={"width": DESK, "height": high}, color_scheme=scheme)
    opened = OpenPage(context.new_page()).open(place)
    opened.page.wait_for_timeout(1500)
    opened.page.screenshot(path=str(FOLDER / f"{name}.png"))
    assert opened.errors == []
    context.close()


def main(folder: Path) -> None:
    run, plan = folder / "tiny", folder / "plan.html"
    if not (run / "report.html").exists():
        trained(run)
    if not plan.exists():
        subprocess.run([*SHOAL, *PLAN, "--html", str(plan)], check=True, stdout=subprocess.DEVNULL)
    with chromium() as browser:
        kept(browser, address(run / "report.html"), "report", 1150)
        kept(browser, address(plan), "plan", 1200)
        with WatchServer(RunFollower(run), port=0) as server:
            kept(browser, server.address, "watch", 900, "dark")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch))
