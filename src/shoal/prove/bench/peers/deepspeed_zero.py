"""DeepSpeed with the ZeRO stage that the layout names; everything not set here at its default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup, mean_loss, mean_over_ranks


def train(setup: PeerSetup, journal: Journal) -> None:
    # A single rank shards nothing.
    stage = setup.job.layout.zero if setup.world > 1 else 0
    train_with(setup, journal, {"stage": stage}, lambda model: setup.adamw(model.parameters()))


def train_with(
    setup: PeerSetup,
    journal: Journal,
    zero: dict[str, Any],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    more: Mapping[str, Any] | None = None,
) -> None:
    """``zero``: the ZeRO section of DeepSpeed's configuration; ``more``: further sections."""
    if setup.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read on import
    os.environ.setdefault("LOCAL_RANK", "0")  # for a single rank, which has no launcher to set it
    import deepspeed

    if setup.world == 1:
        # Collectives through shared memory, which it would compile for minutes: a single rank has none to run.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        backend = "gloo" if setup.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    model = setup.decoder(torch.float32 if setup.mixed else None)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": setup.micro,
            "gradient_accumulation_steps": setup.accumulation,
            "gradient_clipping": setup.recipe.clip,
            "zero_optimization": zero,
            "bf16": {"enabled": setup.compute == torch.bfloat16},
            **(more or {}),
        },
    )
    if engine.zero_optimization_stage() != zero["stage"]:
        raise RuntimeError(f"DeepSpeed runs ZeRO {engine.zero_optimization_stage()}, not {zero['stage']}")
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            loss = mean_loss(engine(batch.tokens), batch.targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        journal.note(mean_over_ranks(total))
