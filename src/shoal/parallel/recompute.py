"""Activation checkpointing: drop activations and recompute them in the backward pass.

``full`` keeps only a block's input. ``selective`` also keeps the results of matmuls, which are expensive to compute,
and recomputes attention, norms and elementwise operations, which are cheap for the memory they save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shoal.facts.layout import Recompute

# What selective recomputation keeps.
MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_mm.default,  # fp8's
    torch.ops.aten._grouped_mm.default,
)


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def selective_contexts() -> Contexts:
    """Contexts for a block's forward pass, which saves matmul results, and for its recomputation, which reuses them."""
    contexts: Contexts = create_selective_checkpoint_contexts(_policy)
    return contexts


def recompute(
    blocks: list[nn.Module],
    kind: Recompute,
    contexts: Callable[[], Contexts] = selective_contexts,
    generators: bool = False,
) -> None:
    """Make these blocks save less for their backward pass. ``contexts`` builds the contexts of selective recomputation.

    ``generators``: the blocks draw from torch's random generators, whose state is then saved. Shoal's own blocks use
    hashes.
    """
    if kind == "none":
        return
    context: dict[str, Any] = {"preserve_rng_state": generators}
    if kind == "selective":
        context["context_fn"] = contexts
    for block in blocks:
        # Wrap ``forward``, not the module: hooks, such as FSDP's, which gather its weights, stay outside.
        block.forward = _checkpointed(block.forward, context)


def _checkpointed(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        if named:
            # Some argument names are also names of checkpoint's own arguments.
            return checkpoint(partial(forward, **named), *arguments, use_reentrant=False, **context)
        return checkpoint(forward, *arguments, use_reentrant=False, **context)

    return run


def keeps(operator: Any, arguments: Sequence[Any]) -> bool:
    """Whether selective recomputation keeps an operator's result."""
    if operator is torch.ops.aten.addmm.default and arguments[0].dim() == 2:
        return False  # an adapter's: cheap, and as large as the product it is added to, which is kept
    return operator in MATRIX_PRODUCTS


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = keeps(operator, arguments)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
