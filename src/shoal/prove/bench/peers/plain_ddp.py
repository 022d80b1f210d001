"""Data parallelism on plain PyTorch: DistributedDataParallel, gradients reduced in the last micro-batch only."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup, mean_loss, mean_over_ranks


def train(setup: PeerSetup, journal: Journal) -> None:
    decoder = setup.decoder()
    setup.compile_blocks(decoder.layers)
    model = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    optimizer = setup.adamw(model.parameters())
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else model.no_sync():
                with setup.autocast():
                    loss = mean_loss(model(batch.tokens), batch.targets) / len(batches)
                loss.backward()
            total += loss.detach()
        setup.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        journal.note(mean_over_ranks(total))
