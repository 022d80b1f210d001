"""Time an optimizer's update on the host's cores, as ``offload=optimizer`` does it: all devices of a node share it.

One pass over fp32 weights, moments and bf16 gradients (``train/host_adamw.py``); if that cannot be compiled, torch's
fused AdamW in cache-sized parts, with gradients widened before and new weights narrowed after. The rate is memory bytes
per second, 28 per parameter (``facts/layout/offload.py``): an update is bound by memory, not arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.adamw import adamw

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.layout import Layout
from shoal.facts.layout.offload import away_bytes
from shoal.facts.recipe import Recipe
from shoal.train import host_adamw
from shoal.train.host_update import PART

TIMES = 5
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
# For one data rank with one micro-batch: gradients in the dtype they were computed in.
EACH = away_bytes(
    Recipe(precision="bf16", optimizer="adamw"), Layout.parse("offload=optimizer"), micro_batches=1
)


def bytes_per_second(elements: int) -> float:
    """With all cores, over this many parameters; the first round warms up."""
    with _all_cores() as threads:
        state = HostState(elements, PART * threads, threads)
        found = []
        for _ in range(TIMES):
            start = time.perf_counter()
            state.update()
            found.append(time.perf_counter() - start)
    return elements * EACH.updated / statistics.median(found[1:])


class HostState:
    """Weights with their moments, gradients and copies, each in one contiguous tensor."""

    def __init__(self, elements: int, piece: int, threads: int) -> None:
        self.threads, self.problem = threads, host_adamw.problem()
        self.master = torch.full((elements,), 0.5)
        self.mean, self.square = torch.zeros(elements), torch.zeros(elements)
        self.gradient = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
        self.back = torch.zeros(elements, dtype=torch.bfloat16)
        self.widened = torch.zeros(min(piece, elements))
        self.steps = torch.zeros(())
        self.piece = piece

    def update(self) -> None:
        self.steps += 1
        if self.problem is not None:
            self._in_parts()
            return
        settings = host_adamw.settings_of(SETTINGS, int(self.steps), 1.0)
        states = self.master, self.mean, self.square
        host_adamw.adamw_(*states, self.gradient, self.back, settings, self.threads)

    def _in_parts(self) -> None:
        (beta1, beta2), lr = SETTINGS["betas"], SETTINGS["lr"]
        for start in range(0, self.master.numel(), self.piece):
            end = min(start + self.piece, self.master.numel())
            master, widened = self.master[start:end], self.widened[: end - start]
            widened.copy_(self.gradient[start:end])
            adamw(
                [master],
                [widened],
                [self.mean[start:end]],
                [self.square[start:end]],
                [],
                [self.steps - 1],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=SETTINGS["weight_decay"],
                eps=SETTINGS["eps"],
                maximize=False,
            )
            self.back[start:end].copy_(master)


@contextmanager
def _all_cores() -> Iterator[int]:
    before, threads = torch.get_num_threads(), usable_threads()
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)
