"""AdamW over a piece of the host's memory in one pass, compiled: each value is read once and written once.

Torch's fused update takes gradients as wide as their weights and writes no narrow copy. So a gradient is widened before
it and a weight narrowed after it, part by part, which on the 16 cores beside an H200 runs at 87 GB/s; this, at 145
(28 bytes a parameter). It needs the C++ compiler that compiled blocks need on a CPU; where there is none, parts do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.facts.problem import first_line
from shoal.parallel.compile import compiler_errors


class CompiledAdamW:
    """Compiled when it is first called."""

    def __init__(self, backend: str) -> None:
        # For any length: there are as many as there are shapes of weights. For any number of threads: a host's cores
        # are shared by as many ranks as it has, and what is compiled is kept on disk.
        options: dict[str, Any] = {"cpp.dynamic_threads": True} if backend == "inductor" else {}
        self._run = torch.compile(adamw_, backend=backend, dynamic=True, fullgraph=True, options=options)
        self._ran = False
        self.problem: str | None = None  # why there is none after all

    def __call__(self, *arguments: Tensor) -> bool:
        """As ``adamw_``; False, with nothing changed, where it cannot be compiled: as the first call finds out."""
        try:
            if self.problem is None:
                self._run(*arguments)
                self._ran = True
        except compiler_errors() as error:
            if self._ran:
                raise
            self.problem = first_line(error)
        return self._ran


def adamw_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    narrow: Tensor,
    scale: Tensor,
    settings: Tensor,
) -> None:
    """All flat and as long. ``narrow``: a copy of the new weight; may be the gradient itself, which is read before.

    ``settings``: as ``settings_of``. In the order of the GPU's kernel (``train/adamw.py``).
    """
    step_size, root_correction, rise1, beta2, rise2, eps, decay = settings.unbind()
    wide = gradient.to(weight.dtype) / scale
    new_mean = mean + (wide - mean) * rise1
    new_square = square * beta2 + wide * wide * rise2
    root = new_square.sqrt() / root_correction + eps
    new_weight = weight - weight * decay - step_size * (new_mean / root)
    mean.copy_(new_mean)
    square.copy_(new_square)
    weight.copy_(new_weight)
    narrow.copy_(new_weight)


def settings_of(group: dict[str, Any], updates: int, dtype: torch.dtype) -> Tensor:
    """Numbers of an update, computed in double precision. ``updates``: how many there are with it."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    root_correction = (1 - beta2**updates) ** 0.5
    numbers = [
        lr / (1 - beta1**updates),
        root_correction,
        1 - beta1,
        beta2,
        1 - beta2,
        group["eps"],
        lr * group["weight_decay"],
    ]
    return torch.tensor(numbers, dtype=dtype, device="cpu")
