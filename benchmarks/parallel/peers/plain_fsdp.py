"""Sharded data parallelism on plain PyTorch: ``fully_shard`` on every block and on the root."""

from __future__ import annotations

import torch
from common import CLIP, Journal, adamw, build, join, mean_loss, mean_over_ranks, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    chosen = options()
    rank, world = join()
    mesh = init_device_mesh("cpu", (world,))
    model = build(chosen.tied)
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    journal = Journal(chosen.steps)
    for batches in journal.micro_batches(rank, world):
        total = torch.zeros(())
        for tokens, targets in batches:
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
