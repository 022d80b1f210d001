"""Data parallelism on plain PyTorch: DistributedDataParallel, gradients summed in the last micro-batch only."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from common import CLIP, Journal, adamw, build, join, mean_loss, mean_over_ranks, options
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    chosen = options()
    rank, world = join()
    model = DistributedDataParallel(build(chosen.tied), gradient_as_bucket_view=True)
    optimizer = adamw(model)
    journal = Journal(chosen.steps)
    for batches in journal.micro_batches(rank, world):
        total = torch.zeros(())
        for number, (tokens, targets) in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else model.no_sync():
                loss = mean_loss(model(tokens), targets) / len(batches)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        journal.finish_step(mean_over_ranks(total))
    journal.close()


if __name__ == "__main__":
    main()
