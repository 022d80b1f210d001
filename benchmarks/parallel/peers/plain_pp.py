"""Pipeline parallelism on plain PyTorch: two stages and ``Schedule1F1B``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from common import CLIP, SIZES, Decoder, Journal, adamw, build, join, mean_loss, options
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

# The head costs more than one and a half blocks, so the first stage takes one more than half of them.
FIRST_STAGE = SIZES.layers // 2 + 1


def main() -> None:
    chosen = options()
    if chosen.tied:
        sys.exit("embedding and head are on different stages here: no --tied")
    rank, world = join()
    last = rank == world - 1
    model = keep_stage(build(tied=False), rank)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, SIZES.batch // SIZES.micro, loss_fn=mean_loss)
    optimizer = adamw(model)
    journal = Journal(chosen.steps)
    for batches in journal.micro_batches(0, 1):
        losses: list[torch.Tensor] = []
        if last:
            schedule.step(target=torch.cat([targets for _, targets in batches]), losses=losses)
        else:
            schedule.step(torch.cat([tokens for tokens, _ in batches]))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(total)
        journal.finish_step(float(total))
    journal.close()


def keep_stage(model: Decoder, stage: int) -> Decoder:
    """What a stage has of the whole model."""
    if stage == 0:
        model.layers = model.layers[:FIRST_STAGE]
        model.norm = model.lm_head = None
    else:
        model.layers = model.layers[FIRST_STAGE:]
        model.embed_tokens = None
    return model


def clip(model: nn.Module) -> None:
    """By the norm of all stages' gradients."""
    parameters = list(model.parameters())
    squared = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).square()
    dist.all_reduce(squared)
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, squared.sqrt())


if __name__ == "__main__":
    main()
