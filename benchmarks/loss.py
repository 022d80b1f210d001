"""The loss of a chunk of logits and their gradients, between the head's products: two compiled passes, and one kernel.

``python benchmarks/loss.py``, on a GPU: milliseconds of each for bf16 logits of a chunk, in turns, the kernel with
several sizes of block and warps. Their results are compared. (Rows with ``programs`` tried fewer programs than rows, so
many for each multiprocessor; 0: a program a row, which was the fastest and is what is used.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from record import record
from torch import Tensor

from shoal.facts.logits import tokens_at_once
from shoal.models.logits import logits_to_gradients_, token_statistics
from shoal.models.loss_kernel import kernel

VOCABULARIES = (128256, 32000)
# Block and warps.
WAYS = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32))
TURNS, IN_A_ROW = 5, 4
FACTOR = 1e-4


def compiled(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    found = token_statistics(logits, targets, 0)
    normaliser = found[1].log() + found[0]
    logits_to_gradients_(logits, targets, 0, normaliser, torch.full_like(normaliser, FACTOR), 0.0)
    return normaliser, found[2]


def milliseconds(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(IN_A_ROW):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / IN_A_ROW


def main() -> None:
    whole = kernel()
    if whole is None:
        raise SystemExit("no Triton here")
    for vocabulary in VOCABULARIES:
        tokens = min(32768, tokens_at_once(vocabulary))
        made = torch.randn(tokens, vocabulary, device="cuda", dtype=torch.bfloat16)
        targets = torch.randint(vocabulary, (tokens,), device="cuda")
        runs = {"compiled": compiled}
        for block, warps in WAYS:
            runs[f"block={block} warps={warps}"] = partial(
                whole, factor=FACTOR, z=0.0, block=block, warps=warps
            )
        logits = made.clone()
        expected = [*compiled(logits, targets), logits.clone()]
        errors = {}
        for name, run in runs.items():
            logits.copy_(made)
            found = [*run(logits, targets), logits]
            errors[name] = max(
                float((one.float() - other.float()).abs().max() / other.float().abs().max())
                for one, other in zip(found, expected, strict=True)
            )
        del expected
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(TURNS):
            for name, run in runs.items():
                times[name].append(milliseconds(partial(run, logits, targets)))
        rows = {name: {"ms": statistics.median(one), "error": errors[name]} for name, one in times.items()}
        record("loss", tokens=tokens, vocabulary=vocabulary, ways=rows)


if __name__ == "__main__":
    main()
