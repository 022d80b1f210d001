"""Create this process's CUDA context for all of its threads."""

from __future__ import annotations

import torch


def take(device: torch.device) -> None:
    """Make this the current device, here and in the thread in which autograd will run backward passes for it.

    That thread has no CUDA context until it launches a kernel. If its first operation is a matmul, as in a pipeline
    stage, cuBLAS finds no context, and torch warns and creates one. So launch a kernel there first.
    """
    torch.cuda.set_device(device)
    leaf = torch.ones((), device=device, requires_grad=True)
    (leaf * 1.0).backward()
