"""A LoRA run's weights as one network's: what its adapters stand beside, with their products added."""

from __future__ import annotations

import torch

from shoal.facts.model import Model
from shoal.facts.model.parameters import LORA_FACTORS, adapter_parameters
from shoal.models.initial import Slice
from shoal.parallel.apply import Fill
from shoal.train.checkpoint.read import Checkpoint, Wanted


def merged(checkpoint: Checkpoint, model: Model, base: Fill, state: str = "weight") -> Fill:
    """W + alpha/rank · B·A, added up in at least fp32. ``model``: with its adapters; ``base`` gives W.

    Of A and B each rank reads what its part of W is made of. ``state``: the adapters, or the average of them.
    """
    adapters = model.adapters
    assert adapters is not None
    beside = {
        one.name.removesuffix(f".{LORA_FACTORS[0]}.weight")
        for one in adapter_parameters(model)
        if one.name.endswith(f".{LORA_FACTORS[0]}.weight")
    }

    @torch.no_grad()
    def fill(slices: list[tuple[str, Slice]]) -> None:
        base(slices)
        for name, part in slices:
            path = name.removesuffix(".weight")
            if path not in beside:
                continue
            (first, left), (rows, columns) = part.offset, part.local.shape
            into = torch.empty(adapters.rank, columns, dtype=checkpoint.dtype(state))
            out = torch.empty(rows, adapters.rank, dtype=into.dtype)
            checkpoint.read(
                [
                    Wanted(state, f"{path}.{LORA_FACTORS[0]}.weight", (0, left), into),
                    Wanted(state, f"{path}.{LORA_FACTORS[1]}.weight", (first, 0), out),
                ]
            )
            wide = torch.promote_types(torch.promote_types(into.dtype, part.local.dtype), torch.float32)
            added = adapters.scale * (out.to(wide) @ into.to(wide))
            part.local.copy_(part.local.to(wide) + added.to(part.local.device))

    return fill
