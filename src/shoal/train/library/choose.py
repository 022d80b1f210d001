"""``layout="auto"`` for a module that Shoal did not build: replicas if they fit, otherwise shards."""

from __future__ import annotations

import torch
from torch import nn

from shoal.facts.layout import Layout

# Tensors of a parameter's size: itself, its gradient and two states of AdamW.
COPIES = 4
# The fraction of device memory these may fill; the rest is for activations.
SHARE = 0.5


def choose_layout(model: nn.Module, world: int, device: torch.device) -> Layout:
    """``dp`` communicates less; ``fsdp`` needs less memory."""
    if world == 1:
        return Layout()
    wanted = COPIES * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if device.type != "cuda":
        return Layout(dp=world)
    _, there = torch.cuda.mem_get_info(device)
    return Layout(dp=world) if wanted <= SHARE * there else Layout(fsdp=world)
