"""On this machine's device: are first weights a CPU's, and is a stopped and continued run the same to the bit?"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from record import record

from shoal.facts.model.presets import PRESETS
from shoal.models.decoder import build
from shoal.models.initial import initialise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    options = parser.parse_args()
    record(
        "same_run",
        steps=options.steps,
        set=["recipe.dropout=0.1"],
        first_weights_as_on_cpu=first_weights_as_on_cpu(),
        resumed={precision: resumed(precision, options.steps) for precision in options.precisions},
    )


def first_weights_as_on_cpu() -> bool:
    """Every bit of the first weights of a 124M-parameter model."""
    model = PRESETS["gpt2"]
    devices = ["cpu", "cuda" if torch.cuda.is_available() else "cpu"]
    networks = [build(model).to_empty(device=device) for device in devices]
    for network in networks:
        initialise(network, model, seed=7)
    pairs = zip(*(network.parameters() for network in networks), strict=True)
    return all(torch.equal(one, other.cpu()) for one, other in pairs)


def resumed(precision: str, steps: int) -> dict[str, bool | int]:
    """A run stopped by SIGTERM after a quarter of its steps and continued, against one that was left alone."""
    with TemporaryDirectory() as directory:
        whole, part = Path(directory) / "whole", Path(directory) / "part"
        start(whole, precision, steps).wait()
        stopped = start(part, precision, steps)
        while lines(part) < steps // 4 and stopped.poll() is None:
            time.sleep(0.02)
        stopped.send_signal(signal.SIGTERM)
        code = stopped.wait()
        at = lines(part)
        start(part, precision, steps).wait()
        return {
            "exit_code_of_stop": code,
            "stopped_after": at,
            "losses_identical": losses(whole) == losses(part),
            "weights_and_states_identical": hashes(whole, steps) == hashes(part, steps),
        }


def start(run: Path, precision: str, steps: int) -> subprocess.Popen[bytes]:
    values = {
        "recipe.steps": steps,
        "recipe.precision": precision,
        "recipe.dropout": 0.1,
        "checkpoint.every": steps,
        "evaluate.batches": 0,
        "evaluate.samples": 0,
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return subprocess.Popen([sys.executable, "-m", "shoal", "train", "--run", str(run), *sets])


def lines(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def losses(run: Path) -> list[str]:
    return [json.loads(line)["loss_hex"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def hashes(run: Path, steps: int) -> dict[str, str]:
    manifest = json.loads((run / "checkpoints" / f"step-{steps:08d}" / "manifest.json").read_text())
    return {f"{piece['state']} {piece['tensor']}": piece["hash"] for piece in manifest["pieces"]}


if __name__ == "__main__":
    main()
