"""Pipeline parallelism on plain PyTorch: one stage per rank and `Schedule1F1B`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shoal.facts.layout.stages import cut
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.plain_decoder import PlainDecoder
from shoal.prove.bench.setup import PeerSetup, mean_loss


def train(setup: PeerSetup, journal: Journal) -> None:
    rank, world = setup.mesh.rank, setup.world
    last = rank == world - 1
    model = keep_stage(setup.decoder(), setup)
    setup.compile_blocks(model.layers)
    stage = PipelineStage(model, rank, world, setup.device)
    schedule = Schedule1F1B(stage, setup.accumulation, loss_fn=mean_loss)
    optimizer = setup.adamw(model.parameters())
    for batches in setup.batches(journal):
        losses: list[torch.Tensor] = []
        with setup.autocast():
            if last:
                schedule.step(target=torch.cat([batch.targets for batch in batches]), losses=losses)
            elif rank == 0:
                schedule.step(torch.cat([batch.tokens for batch in batches]))
            else:
                schedule.step()
        clip(model, setup.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).mean().detach() if last else torch.zeros((), device=setup.device)
        dist.all_reduce(total)
        journal.note(total)


def keep_stage(model: PlainDecoder, setup: PeerSetup) -> PlainDecoder:
    """Keep a stage's part of the model, cut where Shoal cuts its own: so that stages cost about the same."""
    rank, world = setup.mesh.rank, setup.world
    mine = cut(setup.model, world, setup.recipe.seq)[rank].layers
    model.layers = model.layers[mine.start : mine.stop]
    if rank > 0:
        model.embed_tokens = None
    if rank < world - 1:
        model.norm = model.lm_head = None
    return model


def clip(model: nn.Module, limit: float) -> None:
    """Clip by the norm of all stages' gradients."""
    if limit:
        parameters = list(model.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, squared.sqrt())
