"""DeepSpeed's ZeRO-Offload and ZeRO-Infinity, according to the layout's ``offload``; with its own CPU AdamW.

Its defaults count in elements for models of billions: one of 10⁸ would never leave memory. Here they are sized as Shoal
sizes its own, by the model: what is in flight is a block or two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.facts.layout.offload import waiting
from shoal.facts.model.parameters import parameters
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.peers.deepspeed_zero import train_with
from shoal.prove.bench.setup import PeerSetup

# A tile of the update is read, another is updated, a third is written: weight, moments and gradient of each.
TILE_BUFFERS = 3 * 4
# Weights of two blocks at the same time, as in Shoal: a block has seven matrices.
WEIGHT_BUFFERS = 2 * 7
# As many as Shoal has; the default is 1. Blocks stay 1 MiB: tensors below that size do not leave memory.
AIO = {"intra_op_parallelism": 4}


def train(setup: PeerSetup, journal: Journal) -> None:
    train_with(setup, journal, zero(setup), lambda model: cpu_adamw(setup, model), {"aio": AIO})


def zero(setup: PeerSetup) -> dict[str, Any]:
    """Its stage 2 keeps weights on the device; offloading more requires stage 3."""
    optimizer, params = (waiting(setup.job.layout.offload, what) for what in ("optimizer", "params"))
    assert optimizer is not None
    given = setup.job.config.offload.scratch
    place = str(setup.directory if given is None else given)
    sizes = [(one.layer, one.size) for one in parameters(setup.job.model)]
    largest = max(size for _, size in sizes)
    block = max(
        sum(size for layer, size in sizes if layer == number) for number in range(setup.job.model.layers)
    )

    def where(nvme: bool) -> dict[str, Any]:
        pinned = setup.device.type == "cuda"
        return {"device": "nvme" if nvme else "cpu", "nvme_path": place, "pin_memory": pinned}

    found: dict[str, Any] = {"stage": 2 if params is None and not optimizer.nvme else 3}
    found["reduce_bucket_size"] = max(block, largest)
    found["offload_optimizer"] = where(optimizer.nvme)
    if found["stage"] == 3:
        found |= {
            "sub_group_size": largest,
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": 2 * block,
            "stage3_max_reuse_distance": 0,
        }
    if optimizer.nvme:
        # Both are off by default: it would wait for each.
        found["offload_optimizer"] |= {
            "pipeline_read": True,
            "pipeline_write": True,
            "buffer_count": TILE_BUFFERS,
        }
    if params is not None:
        found["offload_param"] = where(params.nvme)
        if params.nvme:
            found["offload_param"] |= {
                "buffer_size": largest,
                "buffer_count": WEIGHT_BUFFERS,
                "max_in_cpu": 0,
            }
    return found


def cpu_adamw(setup: PeerSetup, model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam(
        setup.decayed(model.parameters()), adamw_mode=True, **setup.adamw_settings
    )
    return made
