"""Tensor and sequence parallelism on plain PyTorch: `parallelize_module` and `loss_parallel`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from shoal.prove.bench.journal import Journal
from shoal.prove.bench.plain_decoder import PlainDecoder
from shoal.prove.bench.setup import PeerSetup, mean_loss


def train(setup: PeerSetup, journal: Journal) -> None:
    model = setup.decoder()
    split(model, init_device_mesh(setup.device.type, (setup.world,)))
    if setup.model.tied:  # splitting has given each of the two its own parameter
        model.tie()
    setup.compile_blocks(model.layers)
    optimizer = setup.adamw(model.parameters())
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            with loss_parallel():
                with setup.autocast():
                    loss = mean_loss(model(batch.tokens), batch.targets) / len(batches)
                loss.backward()
            whole = loss.detach()
            total += whole.full_tensor() if isinstance(whole, DTensor) else whole
        setup.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        journal.note(total)


def split(model: PlainDecoder, mesh: DeviceMesh) -> None:
    """Split the sequence between blocks, and heads and features inside attention and MLP."""
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
