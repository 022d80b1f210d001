"""Plain PyTorch on one device, as in a first draft: eager, autocast, all logits at once, fused AdamW."""

from __future__ import annotations

import torch

from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup, mean_loss


def train(setup: PeerSetup, journal: Journal) -> None:
    model = setup.decoder()
    optimizer = setup.adamw(model.parameters())
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            with setup.autocast():
                loss = mean_loss(model(batch.tokens), batch.targets) / len(batches)
            loss.backward()
            total += loss.detach()
        setup.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        journal.note(total)
