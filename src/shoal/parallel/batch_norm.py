"""Batch norms of a module that Shoal did not build: their statistics cover the rows of all data ranks.

Statistics of one rank's rows would make the result depend on the layout. Torch's SyncBatchNorm does the same, but only
on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.parallel.tensor_region import all_reduce


class SumBothWays(torch.autograd.Function):
    """Forward: all-reduce. Backward: all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(local, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Batch norms whose statistics cover only one rank's rows."""
    found = (one for one in module.modules() if isinstance(one, _BatchNorm))
    return [norm for norm in found if not isinstance(norm, nn.SyncBatchNorm)]


def share_statistics(norms: Sequence[nn.Module], group: dist.ProcessGroup, ranks: int) -> None:
    """Make batch norms see the rows of all ``ranks``; every rank must have equally many."""
    for norm in norms:
        norm.forward = MethodType(_shared(norm.forward, group, ranks), norm)


def _shared(alone: Any, group: dist.ProcessGroup, ranks: int) -> Any:
    def forward(norm: Any, x: Tensor) -> Tensor:
        if not norm.training:
            result: Tensor = alone(x)
            return result
        shape = [1, -1, *(1 for _ in x.shape[2:])]
        rest = [axis for axis in range(x.dim()) if axis != 1]
        count = x.numel() // x.shape[1] * ranks
        # At least fp32, as in torch's own.
        wide = x.float() if x.dtype.itemsize < 4 else x
        mean: Tensor = SumBothWays.apply(wide.sum(rest), group) / count
        away = wide - mean.view(shape)
        variance: Tensor = SumBothWays.apply(away.square().sum(rest), group) / count
        if norm.track_running_stats:
            _follow(norm, mean.detach(), variance.detach() * (count / max(1, count - 1)))
        scaled = away * torch.rsqrt(variance + norm.eps).view(shape)
        if norm.affine:
            scaled = scaled * norm.weight.view(shape) + norm.bias.view(shape)
        return scaled.to(x.dtype)

    return forward


@torch.no_grad()
def _follow(norm: Any, mean: Tensor, variance: Tensor) -> None:
    norm.num_batches_tracked += 1
    share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)
