"""A model's loss as a sum, with the number of targets it covers.

Means cannot be added: micro-batches and ranks have different numbers of targets. So a model's own mean is multiplied by
the number of targets it was taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.facts.problem import BadInput
from shoal.train.library.batches import rows_of

IGNORED = -100  # torch's and transformers' mark for "not a target"
# A sum and its number of targets; or a mean over the rows.
Loss = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, Any]"]
OWN = "run.step(model, batch, loss=lambda model, batch: …), which returns a mean over rows, or (sum, number of targets)"


def with_labels(model: nn.Module, batch: Any) -> Any:
    """Use a causal language model's input tokens as labels if a batch has none."""
    if (
        not isinstance(batch, Mapping)
        or "labels" in batch
        or "input_ids" not in batch
        or not _is_causal(model)
    ):
        return batch
    labels = batch["input_ids"]
    if (mask := batch.get("attention_mask")) is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(mask == 0, IGNORED)
    return {**batch, "labels": labels}


def count_targets(model: nn.Module, batch: Any) -> int:
    """How many targets a model's own mean loss covers in a batch: 1 per row if it has no labels per token."""
    if not isinstance(batch, Mapping):
        return rows_of(batch)
    if isinstance(shifted := batch.get("shift_labels"), Tensor):
        return int((shifted != IGNORED).sum())
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return rows_of(batch)
    # The first token is not predicted.
    shifts = labels.dim() > 1 and _shifts(model)
    return int((labels[..., 1:] if shifts else labels).ne(IGNORED).sum())


def own_loss(model: nn.Module, batch: Any, targets: int) -> Tensor:
    """The sum of the model's own losses over this many targets."""
    outputs = (
        model(**batch) if isinstance(batch, Mapping) else model(*batch) if _is_row(batch) else model(batch)
    )
    loss = _loss_of(outputs)
    if loss is None or loss.dim() != 0:
        raise BadInput(f"{type(model).__name__} gave no loss for this batch", OWN)
    if targets:
        return loss * targets
    # A mean over nothing is NaN; its parameters still need gradients to join other ranks' collectives.
    return torch.zeros_like(loss) + sum(0.0 * one.sum() for one in _tensors(outputs) if one is not loss)


def given_loss(loss: Loss, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    found = loss(model, batch)
    if isinstance(found, tuple):
        total, count = found
        return total, int(count)
    rows = rows_of(batch)
    return found * rows, rows


def _is_row(batch: Any) -> bool:
    return isinstance(batch, tuple | list)


def _loss_of(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    else:
        found = getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple) and outputs and isinstance(outputs[0], Tensor):
        found = outputs[0]
    return found if isinstance(found, Tensor) else None


def _tensors(outputs: Any) -> list[Tensor]:
    values = (
        outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else ()
    )
    return [
        one for one in values if isinstance(one, Tensor) and one.is_floating_point() and one.requires_grad
    ]


def _is_causal(model: nn.Module) -> bool:
    name = type(model).__name__.removeprefix("FSDP")
    return name.endswith(("ForCausalLM", "LMHeadModel", "CausalLM"))


def _shifts(model: nn.Module) -> bool:
    """Whether transformers' loss compares each position with the next token."""
    kind = getattr(model, "loss_type", None)
    return kind == "ForCausalLM" or (kind is None and _is_causal(model))
