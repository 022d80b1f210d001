"""DeepSpeed's ZeRO-Offload and ZeRO-Infinity, according to the layout's ``offload``; with its own CPU AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.facts.layout.offload import waiting
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.peers.deepspeed_zero import train_with
from shoal.prove.bench.setup import PeerSetup


def train(setup: PeerSetup, journal: Journal) -> None:
    train_with(setup, journal, zero(setup), lambda model: cpu_adamw(setup, model))


def zero(setup: PeerSetup) -> dict[str, Any]:
    """Its stage 2 keeps weights on the device; offloading more requires stage 3."""
    optimizer, params = (waiting(setup.job.layout.offload, what) for what in ("optimizer", "params"))
    assert optimizer is not None
    given = setup.job.config.offload.scratch
    place = str(setup.directory if given is None else given)

    def where(nvme: bool) -> dict[str, Any]:
        pinned = setup.device.type == "cuda"
        return {"device": "nvme" if nvme else "cpu", "nvme_path": place, "pin_memory": pinned}

    found: dict[str, Any] = {"stage": 2 if params is None and not optimizer.nvme else 3}
    found["offload_optimizer"] = where(optimizer.nvme)
    if optimizer.nvme:
        # Both are off by default: it would wait for each.
        found["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
    if params is not None:
        model = setup.job.model
        largest = model.hidden * max(model.vocab, model.ffn)
        found["offload_param"] = where(params.nvme)
        if params.nvme:
            found["offload_param"] |= {"buffer_size": largest}
    return found


def cpu_adamw(setup: PeerSetup, model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam(
        setup.decayed(model.parameters()), adamw_mode=True, **setup.adamw_settings
    )
    return made
