"""The library against the same loop in plain PyTorch: an unmodified transformers model, in turns, in one process.

python benchmarks/library.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import transformers
from record import record
from torch import nn

import shoal

Step = Callable[[dict[str, torch.Tensor]], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--hidden", type=int, default=2048 if cuda else 128)
    parser.add_argument("--layers", type=int, default=16 if cuda else 4)
    parser.add_argument("--vocab", type=int, default=32000 if cuda else 1024)
    parser.add_argument("--seq", type=int, default=2048 if cuda else 128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each in a turn")
    options = parser.parse_args()
    torch.set_num_threads(1 if not cuda else torch.get_num_threads())
    device = torch.device("cuda" if cuda else "cpu")
    # Where others compute on the same cores, only the time that this process had of them says anything.
    clock = time.perf_counter if cuda else time.process_time
    rows = [torch.randint(0, options.vocab, (options.batch, options.seq)) for _ in range(options.steps)]
    batches = [{"input_ids": tokens, "labels": tokens} for tokens in rows]
    sides: dict[str, Step] = {"plain": plain(build(options), device), "shoal": library(build(options))}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.turns + 1):
        # First one, then the other begins.
        for name in sorted(sides, reverse=bool(turn % 2)):
            began = clock()
            found = [sides[name](batch) for batch in batches]
            losses[name] += [float(loss) for loss in found]
            if turn:  # the first warms up
                seconds[name].append((clock() - began) / len(batches))
    ratios = [one / other for one, other in zip(seconds["plain"], seconds["shoal"], strict=True)]
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    tokens = options.batch * options.seq
    record(
        "library",
        model={key: value for key, value in vars(options).items() if key not in ("turns", "steps")},
        precision="bf16 autocast" if cuda else "fp32",
        transformers=version("transformers"),
        turns=options.turns,
        clock="wall" if cuda else "processor time of one thread",
        tokens_per_s={name: tokens / median for name, median in medians.items()},
        ratio=statistics.median(ratios),
        ratios=sorted(ratios),
        largest_loss_difference=max(
            abs(a - b) for a, b in zip(losses["plain"], losses["shoal"], strict=True)
        ),
    )


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 256),
        max_position_embeddings=options.seq,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(model: nn.Module, device: torch.device) -> Step:
    model.to(device)
    optimizer = optimizer_of(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def library(model: nn.Module) -> Step:
    run = shoal.run("dp=1", clip=1.0)
    model, _ = run.prepare(model, optimizer_of(model))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            return run.step(model, batch)

    return step


if __name__ == "__main__":
    main()
