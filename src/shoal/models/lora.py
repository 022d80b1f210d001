"""LoRA and DoRA: a low-rank pair beside each targeted projection of every block, trained while everything else is
frozen.

The pair is part of its projection (``models/linear.py``), so tensor ranks, recomputation and compilation treat both
together; ``facts/model/parameters.adapters`` decides how tensor ranks split each factor.
"""

from __future__ import annotations

import torch

from shoal.facts.model import Adapters
from shoal.models.decoder import Network
from shoal.models.dropout import Dropout
from shoal.models.linear import Linear


def add_adapters(network: Network, adapters: Adapters) -> None:
    """Add adapters to a network on the meta device and freeze its other parameters."""
    network.requires_grad_(False)
    dtype = next(network.parameters()).dtype
    for block in network.model.layers.values():
        for name, module in list(block.named_modules()):
            if isinstance(module, Linear) and name.rpartition(".")[2] in adapters.targets:
                with torch.device("meta"):
                    into = Linear(module.in_features, adapters.rank, bias=False)
                    out = Linear(adapters.rank, module.out_features, bias=False)
                module.lora_A, module.lora_B = into.to(dtype), out.to(dtype)
                module.lora_scale = adapters.scale
                if adapters.dropout:
                    module.lora_dropout = Dropout(f"{name}.lora", adapters.dropout)
                if adapters.kind == "dora":
                    lengths = torch.empty(module.out_features, dtype=dtype, device="meta")
                    module.lora_magnitude_vector = torch.nn.Parameter(lengths)
