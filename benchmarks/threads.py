"""How many threads a step of a small model wants: one against several, on quiet cores and on cores that others share.

The forward pass, the backward pass and the update of the real network, pinned to so many cores; on shared cores, one
other process computes on each of them. ``work`` is the FLOPs of a layer's square product, 2 x tokens x hidden².
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time

import torch
from record import record

from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.models.decoder import build

LAYERS = 8
# Hidden size and tokens of a micro-batch.
SHAPES = (
    (64, 128),
    (64, 512),
    (64, 2048),
    (128, 512),
    (128, 2048),
    (128, 8192),
    (256, 512),
    (256, 2048),
    (512, 1024),
    (1024, 512),
)
SEQ = 128


def shape(hidden: int) -> Model:
    changes = {"hidden": hidden, "head_dim": hidden // 8, "ffn": 3 * hidden, "layers": LAYERS}
    return PRESETS["tiny"].model_copy(update=changes)


class Steps:
    """A network, an optimizer and a batch to repeat."""

    def __init__(self, hidden: int, tokens: int) -> None:
        self.network = build(shape(hidden), device="cpu", length=SEQ)
        for parameter in self.network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), fused=True)
        self.tokens = torch.randint(256, (max(1, tokens // SEQ), SEQ))
        self.positions = torch.arange(SEQ).expand_as(self.tokens)

    def seconds(self, repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            loss, count = self.network.lm_head(self.network(self.tokens, self.positions), self.tokens)
            (loss / count).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - began) / repeats


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(10_000))


def measure(hidden: int, tokens: int, counts: list[int], rounds: int) -> dict[int, float]:
    """Seconds a step, by threads: rounds take turns, so that what else happens strikes all alike."""
    steps = Steps(hidden, tokens)
    torch.set_num_threads(1)
    repeats = max(1, round(0.15 / steps.seconds(2)))
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            torch.set_num_threads(count)
            steps.seconds(1)
            times[count].append(steps.seconds(repeats))
    return {count: statistics.median(found) for count, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    counts = [count for count in (1, 2, 4, 8, 16) if count <= len(cores)]
    os.sched_setaffinity(0, set(cores))
    for shared in (False, True):
        others = [multiprocessing.Process(target=spin, args=(core,), daemon=True) for core in cores * shared]
        for other in others:
            other.start()
        for hidden, tokens in SHAPES:
            found = measure(hidden, tokens, counts, options.rounds)
            record(
                "threads",
                pinned_to=len(cores),
                network=f"shoal, {LAYERS} layers",
                others_on_each_core=int(shared),
                hidden=hidden,
                tokens=tokens,
                work=2 * tokens * hidden**2,
                step_ms={str(count): round(1000 * seconds, 3) for count, seconds in found.items()},
                gain={str(count): round(found[1] / seconds, 3) for count, seconds in found.items()},
            )
        for other in others:
            other.kill()


if __name__ == "__main__":
    main()
