"""AdamW's update of a model's parameters, torch's fused one and ours: ``python benchmarks/optimizer.py MODEL``.

Three ways to keep a parameter: states as narrow as the computation; fp32 masters and gradients beside working copies;
fp32 masters with gradients that stay as they were computed. A row a way in ``results/optimizer.jsonl``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import record
from torch import Tensor, nn

from shoal.facts.model.parameters import parameters
from shoal.facts.model.presets import PRESETS
from shoal.train.adamw import AdamW

BF16, FP32 = torch.bfloat16, torch.float32
WAYS = {"narrow states": (BF16, BF16), "masters": (FP32, FP32), "masters, narrow gradients": (FP32, BF16)}
WARM_UP, STEPS = 3, 10


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "llama3.2-1b"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [parameter.shape for parameter in parameters(PRESETS[name])]
    for way, (states, gradients) in WAYS.items():
        weights = [nn.Parameter(torch.zeros(shape, dtype=states, device=device)) for shape in shapes]
        working: dict[Tensor, Tensor] = {}
        if states == FP32:
            working = {weight: weight.detach().to(BF16) for weight in weights}
        for weight in weights:
            weight.grad_dtype = gradients
            weight.grad = torch.randn_like(weight, dtype=gradients)
        ours = AdamW([{"params": weights}], working, lr=1e-4)
        found = {"ours_s": seconds(steered(ours, working, ours.writes_copies), device)}
        if states == gradients:
            theirs = torch.optim.AdamW(weights, lr=1e-4, fused=True)
            found["torch_s"] = seconds(steered(theirs, working, False), device)
        record("optimizer", model=name, way=way, kernel=ours.writes_copies, **found)
        del weights, working, ours


def steered(optimizer: Any, working: dict[Tensor, Tensor], copies: bool) -> Callable[[], None]:
    """An update that clips, and the copies that a network reads."""
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.grad_scale = torch.ones((), device=device)

    @torch.no_grad()
    def update() -> None:
        optimizer.step()
        if working and not copies:
            torch._foreach_copy_(list(working.values()), [weight.detach() for weight in working])

    return update


def seconds(work: Callable[[], None], device: torch.device) -> float:
    taken = []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[WARM_UP:])


if __name__ == "__main__":
    main()
