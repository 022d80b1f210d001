"""Lightning Fabric: the plain decoder in the loop that Fabric's documentation shows, blocks compiled on a GPU."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup, mean_loss


def train(setup: PeerSetup, journal: Journal) -> None:
    if setup.compute == torch.float32:
        precision = "32-true"
    else:
        precision = "bf16-mixed" if setup.mixed else "bf16-true"
    accelerator = "cuda" if setup.device.type == "cuda" else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    decoder = setup.decoder()
    setup.compile_blocks(decoder.layers)
    model, optimizer = fabric.setup(decoder, setup.adamw(decoder.parameters()))
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            loss = mean_loss(model(batch.tokens), batch.targets) / len(batches)
            fabric.backward(loss)
            total += loss.detach()
        if setup.recipe.clip:
            fabric.clip_gradients(model, optimizer, max_norm=setup.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        journal.note(total)
