"""Activation checkpointing: drop activations and recompute them in the backward pass.

``full`` keeps a block's input alone. ``selective`` also keeps what matrix multiplications gave, which is dear to
compute, and repeats attention, norms and the elementwise rest, which are cheap for the memory they take.
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
    """For a block's forward pass, which keeps matrix products, and for its repetition, which is given them."""
    contexts: Contexts = create_selective_checkpoint_contexts(_policy)
    return contexts


def recompute(
    blocks: list[nn.Module],
    kind: Recompute,
    contexts: Callable[[], Contexts] = selective_contexts,
    generators: bool = False,
) -> None:
    """From now on these blocks keep less for their backward pass. ``contexts``: of a selective one.

    ``generators``: they draw from torch's, whose state is then kept. Random numbers of our own blocks are hashes.
    """
    if kind == "none":
        return
    context: dict[str, Any] = {"preserve_rng_state": generators}
    if kind == "selective":
        context["context_fn"] = contexts
    for block in blocks:
        # Around forward and not around the module: hooks, such as FSDP's, which gather its weights, stay outside.
        block.forward = _checkpointed(block.forward, context)


def _checkpointed(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        if named:
            # Some names of its arguments are also names of checkpoint's own.
            return checkpoint(partial(forward, **named), *arguments, use_reentrant=False, **context)
        return checkpoint(forward, *arguments, use_reentrant=False, **context)

    return run


def keeps(operator: Any, arguments: Sequence[Any]) -> bool:
    """Whether selective recomputation keeps what an operator gives."""
    if operator is torch.ops.aten.addmm.default and arguments[0].dim() == 2:
        return False  # an adapter's: cheap, and as large as the product that it is added to, which is kept
    return operator in MATRIX_PRODUCTS


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = keeps(operator, arguments)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
