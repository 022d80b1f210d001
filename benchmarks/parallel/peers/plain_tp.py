"""Tensor and sequence parallelism on plain PyTorch: ``parallelize_module`` and ``loss_parallel``."""

from __future__ import annotations

import torch
from common import CLIP, Decoder, Journal, adamw, build, join, mean_loss, options
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def main() -> None:
    chosen = options()
    _, world = join()
    model = build(chosen.tied)
    split(model, init_device_mesh("cpu", (world,)))
    if chosen.tied:  # splitting has given each of the two a parameter of its own
        model.lm_head.weight = model.embed_tokens.weight
    optimizer = adamw(model)
    journal = Journal(chosen.steps)
    for batches in journal.micro_batches(0, 1):
        total = torch.zeros(())
        for tokens, targets in batches:
            with loss_parallel():
                loss = mean_loss(model(tokens), targets) / len(batches)
                loss.backward()
            total += loss.detach().full_tensor()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        journal.finish_step(float(total))
    journal.close()


def split(model: Decoder, mesh: DeviceMesh) -> None:
    """Between the blocks the sequence is split, within attention and MLP the heads and the features are."""
    parallelize_module(
        model,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


if __name__ == "__main__":
    main()
