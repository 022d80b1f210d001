"""Create this process's CUDA context for all of its threads."""

from __future__ import annotations

import torch


def take(device: torch.device) -> None:
    """Make it the current device, here and in the thread in which autograd will compute backward passes for it.

    That thread has no CUDA context until it launches a kernel. Where the first thing that it does is a matrix product,
    as in a pipeline's stage, cuBLAS finds none, and torch warns and makes one. So let it launch something first.
    """
    torch.cuda.set_device(device)
    leaf = torch.ones((), device=device, requires_grad=True)
    (leaf * 1.0).backward()
