"""Take over an optimizer that the script made: it now updates this rank's pieces of its parameters.

It stays the same object, so a scheduler that holds it keeps working.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.facts.problem import BadInput
from shoal.parallel.shards import Shard

# Torch's element-wise optimizers: they update a piece of a parameter as they would update it in the whole.
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
UPDATE = "run.update(), or run.step(model, batch), which is forward, backward and update"
NO_SCALER = (
    "a GradScaler was given: losses are sums here, which do not vanish in fp16 as means do",
    "leave it out, and compute in bf16: torch.autocast(device, torch.bfloat16) around run.step",
)


class _NoScaler:
    """Replaces the attribute by which ``GradScaler`` asks what an optimizer supports; with shards torch's own
    assertion fails first.
    """

    def __bool__(self) -> bool:
        raise BadInput(*NO_SCALER)


def check_optimizer(optimizer: Any, module: nn.Module, sharded: bool) -> None:
    """Refuse what is not supported, before anything is placed."""
    if isinstance(optimizer, torch.amp.GradScaler):
        raise BadInput(*NO_SCALER)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"{type(optimizer).__name__} is no optimizer", "torch.optim.AdamW(model.parameters(), lr=…)"
        )
    if optimizer.state:
        raise BadInput("the optimizer has taken steps already", "run.prepare before the first of them")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput(
            "LBFGS calls the loss itself, several times per step", "another optimizer, such as AdamW"
        )
    if sharded and not isinstance(optimizer, ELEMENTWISE) and not getattr(optimizer, "elementwise", False):
        raise BadInput(
            f"{type(optimizer).__name__} may look at whole matrices, and this layout cuts them into pieces",
            "a layout of dp alone; or, if it treats every element by itself, optimizer.elementwise = True",
        )
    known = set(module.parameters())
    for group in optimizer.param_groups:
        if any(parameter not in known for parameter in group["params"]):
            raise BadInput(
                "the optimizer has parameters that the model has not", "make it of model.parameters()"
            )


def take_over(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], updated: dict[Shard, nn.Parameter]
) -> None:
    """Replace the optimizer's parameters (``names``) by what is ``updated`` on this rank."""
    by_name = {piece.name: tensor for piece, tensor in updated.items()}
    for group in optimizer.param_groups:
        own = [names[parameter] for parameter in group["params"]]
        group["params"] = [by_name[name] for name in own if name in by_name]
    _guard(optimizer)


def _guard(optimizer: torch.optim.Optimizer) -> None:
    """Refuse direct calls: a script that still calls ``optimizer.step()`` would update with one rank's gradients."""

    def refuse(*_: Any) -> None:
        if not getattr(optimizer, "_shoal_updates", False):
            raise BadInput(
                "optimizer.step() was called outside of the run, which adds up all ranks' gradients", UPDATE
            )

    optimizer.register_step_pre_hook(refuse)
    given: Any = optimizer
    # Whether device tensors can make it scale gradients, or skip the update.
    given._shoal_steered = bool(getattr(given, "_step_supports_amp_scaling", False))
    given._step_supports_amp_scaling = _NoScaler()


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer, updated: list[nn.Parameter], divisor: Tensor | float, sound: Tensor
) -> bool | None:
    """Update once with the gradients divided by ``divisor``, unless they are not ``sound``.

    Returns whether it updated; None if only the device knows.
    """
    gradients = [one.grad for one in updated if one.grad is not None]
    steered: Any = optimizer
    on_device = steered._shoal_steered and not any(
        one.dtype == torch.float64 or one.device != sound.device for one in gradients
    )
    known: bool | None = None
    plain = isinstance(divisor, float) and divisor == 1.0
    if on_device:
        steered.found_inf = (~sound).float()
        steered.grad_scale = None if plain else torch.as_tensor(divisor, device=sound.device).float()
    else:
        known = bool(sound)
        if not known:
            return False
        if not plain:
            for device in {one.device for one in gradients}:
                number = divisor.to(device) if isinstance(divisor, Tensor) else divisor
                torch._foreach_div_([one for one in gradients if one.device == device], number)
    steered._shoal_updates = True
    try:
        optimizer.step()
    finally:
        steered._shoal_updates = False
        if on_device:
            steered.found_inf = steered.grad_scale = None
    return known
