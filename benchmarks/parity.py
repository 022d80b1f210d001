"""``shoal parity``, with its outcome kept: each layout's differences from one process.

python benchmarks/parity.py examples/tiny.toml --precision bf16 --set compile.enabled=true --set recipe.seq=32
"""

from __future__ import annotations

import json
import subprocess
import sys

from record import record

KEPT = (
    "layout",
    "ok",
    "bit_identical",
    "max_loss_diff",
    "max_grad_diff",
    "max_later_grad_diff",
    "max_param_diff",
    "seconds",
)


def main() -> None:
    """Arguments are the command's."""
    words = sys.argv[1:]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "parity", *words, "--json"], stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout)
    if not found.get("layouts"):
        sys.exit(done.stdout)  # bad input, in its own words
    for proof in (found, *found["also"]):
        record(
            "parity",
            command=" ".join(["shoal parity", *words]),
            precision=proof["precision"],
            steps=proof["steps"],
            losses=proof["reference"]["losses"],
            layouts=[{key: row[key] for key in KEPT} for row in proof["layouts"]],
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
