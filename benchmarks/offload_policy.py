"""A peer for benchmarks/offload.py: FSDP2's own ``CPUOffloadPolicy`` on Shoal's network, blocks and loss, all compiled.

Weights rest in the host's pinned memory in fp32, are sent as they are used, gradients come back, and torch's fused
AdamW updates on the host after clipping. Prints a row as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.parallel.compile import CompiledBlocks
from shoal.parallel.pipeline import my_stages
from shoal.parallel.recompute import recompute
from shoal.parallel.stage_module import MicroBatch, local_tensor, split_stages
from shoal.train.program import BACKEND, blueprint

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        # Norms of gradients are the host's.
        backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        print(json.dumps(measure(options, device)))
        dist.destroy_process_group()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    on_gpu = device.type == "cuda"
    model = PRESETS[options.model]
    recipe = Recipe(seq=options.seq, batch=options.micro, steps=100, precision="bf16")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    network = blueprint(model, recipe)
    (segment,) = split_stages(network, my_stages(model, Layout(), 0, recipe.seq), own_head=False)
    blocks = list(segment.network.model.layers.values())
    recompute(blocks, options.recompute)
    if on_gpu and not options.eager:
        CompiledBlocks(blocks, options.recompute, BACKEND)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = {"mesh": mesh, "mp_policy": policy, "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu)}
    for block in blocks:
        fully_shard(block, **shard)
    fully_shard(segment, reshard_after_forward=False, **shard)
    segment.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in segment.parameters():
            here = local_tensor(parameter)
            made = torch.ones if here.ndim == 1 else torch.randn  # on the device: a host takes minutes
            here.copy_(made(here.shape, device=device) * (1.0 if here.ndim == 1 else 0.02))
    optimizer = torch.optim.AdamW(
        segment.parameters(),
        lr=recipe.peak_lr,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, model.vocab, (options.micro, options.seq)).to(device)
    positions = torch.arange(options.seq, device=device).expand_as(tokens).contiguous()
    batch = MicroBatch(tokens, positions, None, tokens.roll(-1, 1), None)
    ends = []
    for number in range(1, WARM_UP + options.steps + 2):
        if on_gpu and number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        segment.network.lm_head.start_step(1.0 / tokens.numel(), None)
        segment(tokens, batch)[0].backward()
        torch.nn.utils.clip_grad_norm_(segment.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    taken = [after - one for one, after in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
    return {
        "layout": f"fsdp2 CPUOffloadPolicy,micro={options.micro},recompute={options.recompute}",
        "step_s": statistics.median(taken),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "resident_more_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident,
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
