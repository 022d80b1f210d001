"""All-gather the weights of fp8 matmuls in fp8 (``zero=3``): one byte per value to send and to hold.

A weight's scale is that of the whole weight, so each rank can quantise its own rows before sending them: the numbers
equal those of rows gathered in bf16 and quantised afterwards. FSDP asks the tensor that holds a rank's rows how to send
them and how to unpack what arrived (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``).

What arrives is the matmul's operand as it is. A one-byte parameter would have one-byte gradients, so the parameter that
FSDP gives to the module is a different one: bf16, with a shape and a gradient but no storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.facts.layout.float8 import gathered_alike, rounded_before_gathering
from shoal.facts.recipe import Scaling
from shoal.models.float8 import PRECISE, rounded
from shoal.models.linear import Linear


class Float8Gather:
    """How FSDP all-gathers one projection's weight."""

    def __init__(self, linear: Linear, rows: Tensor) -> None:
        """``rows``: this rank's rows of the weight."""
        self.linear, self.rows = linear, rows
        self.without_storage: Tensor | None = None
        told: Any = rows
        told.fsdp_pre_all_gather, told.fsdp_post_all_gather = self.before, self.after

    def before(
        self, mesh: object, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        """What to send, as plain bytes: gloo knows no other type of this width, and norms are in the same message."""
        scales = self.linear.weight_scales
        assert scales is not None
        # Through bf16, the dtype of working copies in all other layouts.
        return (rounded(self.rows.bfloat16(), scales.forward, PRECISE).view(torch.uint8),), None

    def after(
        self, came: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What arrives is always in the same tensor; FSDP frees and reallocates its storage."""
        if out is not None:
            return None
        self.linear.rounded_weight = came[0].view(PRECISE)
        self.without_storage = torch.empty(
            self.linear.rounded_weight.shape, dtype=dtype, device=came[0].device
        )
        return self.without_storage, ()

    def drop_storage(self) -> None:
        """Free the storage of the parameter that FSDP has made and keeps."""
        assert self.without_storage is not None
        self.without_storage.untyped_storage().resize_(0)


@torch.no_grad()
def gather_in_float8(blocks: list[nn.Module], scaling: Scaling, ranks: int) -> list[Float8Gather]:
    """Set up all weights that are gathered in fp8. The blocks have left the meta device; nothing has been gathered
    yet.
    """
    found: list[Float8Gather] = []
    if not rounded_before_gathering(scaling):
        return found
    for linear in (child for block in blocks for child in block.modules() if isinstance(child, Linear)):
        weight = linear.weight
        if isinstance(weight, DTensor) and gathered_alike(tuple(weight.shape), ranks):
            # Private: FSDP asks this very tensor, and torch's public accessor returns another view of it.
            found.append(Float8Gather(linear, weight._local_tensor))
    return found
