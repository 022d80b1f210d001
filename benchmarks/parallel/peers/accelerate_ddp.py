"""Data parallelism with Hugging Face Accelerate, in the loop that its documentation shows."""

from __future__ import annotations

import accelerate
import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from common import CLIP, Journal, adamw, build, mean_loss, mean_over_ranks, options, positions_of
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=len(positions_of(0, 2)),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    model = build(chosen.tied)
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    assert isinstance(model, DistributedDataParallel)
    journal = Journal(chosen.steps)
    for batches in journal.micro_batches(accelerator.process_index, accelerator.num_processes):
        total = torch.zeros(())
        for tokens, targets in batches:
            with accelerator.accumulate(model):
                loss = mean_loss(model(tokens), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(batches)
        journal.finish_step(mean_over_ranks(total))
    journal.close(accelerate=accelerate.__version__)


if __name__ == "__main__":
    main()
