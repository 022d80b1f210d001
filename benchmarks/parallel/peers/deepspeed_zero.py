"""ZeRO 1, 2 and 3 with DeepSpeed, everything that is not told here at its default."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from common import CLIP, SIZES, Journal, adamw, build, mean_loss, mean_over_ranks, options, positions_of


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(chosen.tied)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model),
        config={
            "train_micro_batch_size_per_gpu": SIZES.micro,
            "gradient_accumulation_steps": len(positions_of(rank, world)),
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": chosen.stage},
        },
    )
    assert engine.zero_optimization_stage() == chosen.stage
    journal = Journal(chosen.steps)
    for batches in journal.micro_batches(rank, world):
        total = torch.zeros(())
        for tokens, targets in batches:
            loss = mean_loss(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        journal.finish_step(mean_over_ranks(total))
    journal.close(deepspeed=deepspeed.__version__)


if __name__ == "__main__":
    main()
