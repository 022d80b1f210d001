"""How long ``shoal plan`` takes from a cold shell, and how much of the space it had to look at.

On all cores: a large search uses two. ``make setup`` has compiled the sources.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

from record import record

CASES = (
    ("llama3-405b", "16384xH100", 8192, 2048),
    ("llama3-8b", "64xH100", 8192, 512),
    ("llama3-70b", "128xH100", 8192, 1024),
    ("deepseek-v3", "2048xH100", 4096, 8192),
)
TIMES = 3


def main() -> None:
    for model, cluster, seq, batch in CASES:
        asked = f"{model} --on {cluster} --seq {seq} --batch {batch}"
        command = [sys.executable, "-m", "shoal", "plan", *asked.split(), "--json"]
        took = []
        for _ in range(TIMES):
            started = time.perf_counter()
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            took.append(time.perf_counter() - started)
        document = json.loads(said)
        record(
            "plan_speed",
            asked=asked,
            seconds=statistics.median(took),
            of_these_searching=document["seconds"],
            searched=document["searched"],
            best=document["plans"][0]["layout"],
        )


if __name__ == "__main__":
    main()
