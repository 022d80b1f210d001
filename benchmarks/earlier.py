"""Is training on this machine as fast as it was? Runs of an earlier commit and of this tree, in turns.

Both train the same small model on the same data, with as many threads as OMP_NUM_THREADS says, if it is set. Step times
of all turns are taken together, without the first steps of each: a run that other work on the machine has slowed down
counts as little as its share. With ``--processor`` it is a step's processor seconds, with one thread a rank
(``earlier_step.py``), which other work hardly changes: for machines that are not idle.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from record import record

from shoal.train.files import read_rows

# Of a run, before its times count.
FIRST_STEPS = 20
SOURCES = Path(__file__).parents[1] / "src"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="whose tree is the earlier one")
    parser.add_argument("--layouts", default="dp=1;dp=2;fsdp=2;tp=2;pp=2")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--processor", action="store_true", help="processor seconds instead of seconds")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        place = Path(directory)
        command = ["git", "archive", options.commit, "src"]
        archive = subprocess.run(command, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            file.extractall(place, filter="data")
        trees = {"earlier": place / "src", "now": SOURCES}
        for layout in options.layouts.split(";"):
            seconds: dict[str, list[float]] = {name: [] for name in trees}
            for turn in range(options.turns):
                # In the opposite order each time: what slows down towards the end strikes both.
                for name in list(trees)[:: 1 if turn % 2 else -1]:
                    if options.processor:
                        seconds[name].append(processor_seconds(trees[name], layout))
                    else:
                        seconds[name] += steps(trees[name], layout, options.steps, place)
            medians = {name: statistics.median(one) for name, one in seconds.items()}
            record(
                "earlier",
                against=options.commit,
                layout=layout,
                what="processor seconds" if options.processor else "seconds",
                steps=options.steps,
                turns=options.turns,
                threads=os.environ.get("OMP_NUM_THREADS", "as each tree has it"),  # of a rank
                median_s=medians,
                ratio=round(medians["now"] / medians["earlier"], 4),
            )


def processor_seconds(tree: Path, layout: str) -> float:
    """Of a step of that tree's program."""
    command = [sys.executable, str(Path(__file__).with_name("earlier_step.py")), layout]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def steps(tree: Path, layout: str, count: int, place: Path) -> list[float]:
    """Seconds of each step but the first, of a run with that tree's program."""
    run = place / "run"
    settings = [
        f"recipe.steps={count}",
        "cluster.share=true",
        "checkpoint.every=0",
        "evaluate.every=0",
        f"data.cache={place / 'cache'}",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "shoal", "train", "--layout", layout, "--run", str(run), "--fresh"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    subprocess.run([*command, *words], env=environment, cwd=place, check=True, capture_output=True)
    return [float(row["step_s"]) for row in read_rows(run / "metrics.jsonl")[FIRST_STEPS:]]


if __name__ == "__main__":
    main()
