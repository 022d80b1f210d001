"""What a search finds that may take as long as it likes, beside what ``shoal plan`` finds in its time.

    python benchmarks/plan_search.py benchmarks/data/plan_search.json

Of each question: how many layouts there are, the fastest that fits with its predicted seconds, and of the limited
search whether that is the same layout, proven, or else which bound is left. A test holds the first question to this
file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from shoal.facts.layout import Layout
from shoal.plan.request import plan_request
from shoal.plan.search import EFFORT, SearchResult, search

QUESTIONS: tuple[tuple[str, str, int, int], ...] = (
    ("llama3-405b", "16384xH100", 8192, 2048),
    ("llama3-405b", "8192xH100", 8192, 2048),
    ("gpt3-175b", "1024xA100-80GB", 2048, 1536),
    ("llama3-70b", "64xH100", 8192, 256),
    ("mixtral-8x7b", "64xH100", 4096, 1024),
    ("llama3-8b", "64xH100", 1048576, 8),
    ("llama3-8b", "8xH100", 4096, 64),
)


def searched(model: str, on: str, seq: int, batch: int, effort: int | None) -> SearchResult:
    asked = plan_request(model, on, seq=seq, batch=batch).workload(Layout())
    return search(asked.model, asked.cluster, asked.recipe, effort=effort)


def compared(model: str, on: str, seq: int, batch: int) -> dict[str, Any]:
    spent, found = [], []
    for effort in (None, EFFORT):
        start = time.process_time()
        found.append(searched(model, on, seq, batch, effort))
        spent.append(round(time.process_time() - start, 2))
    whole, limited = found
    best, quick = whole.plans[0], limited.plans[0]
    return {
        "question": f"{model} --on {on} --seq {seq} --batch {batch}",
        "layouts": whole.searched,
        "best": str(best.layout),
        "step_s": best.step.seconds,
        "cpu_s": spent[0],
        "limited": {
            "same": quick.layout == best.layout,
            "step_s": quick.step.seconds,
            "proven": limited.proven,
            "at_best_s": limited.at_best,
            "priced": limited.evaluated,
            "cpu_s": spent[1],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    rows = [compared(*question) for question in QUESTIONS]
    parser.parse_args().file.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(row["question"], row["best"], row["step_s"], row["limited"])


if __name__ == "__main__":
    main()
