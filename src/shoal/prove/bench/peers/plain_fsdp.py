"""Sharded data parallelism on plain PyTorch: `fully_shard` on every block and on the root."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup, mean_loss, mean_over_ranks


def train(setup: PeerSetup, journal: Journal) -> None:
    mesh = init_device_mesh(setup.device.type, (setup.world,))
    policy = MixedPrecisionPolicy()
    if setup.mixed:
        policy = MixedPrecisionPolicy(param_dtype=setup.compute, reduce_dtype=setup.states)
    model = setup.decoder()
    setup.compile_blocks(model.layers)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = setup.adamw(model.parameters())
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            loss = mean_loss(model(batch.tokens), batch.targets) / len(batches)
            loss.backward()
            total += loss.detach()
        setup.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        journal.note(mean_over_ranks(total))
