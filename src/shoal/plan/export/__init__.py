"""Export a layout to other stacks: their files, their launch command, and what they cannot express."""

from __future__ import annotations

from shoal.facts.problem import BadInput, did_you_mean
from shoal.plan.export import accelerate, bridge, deepspeed, megatron, nemo, sagemaker, torchtitan
from shoal.plan.export.shared import Exported
from shoal.predict.workload import Workload

_WRITERS = {
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
    "megatron": megatron.write,
    "torchtitan": torchtitan.write,
    "megatron-bridge": bridge.write,
    "nemo": nemo.write,
    "sagemaker": sagemaker.write,
}
STACKS: tuple[str, ...] = tuple(_WRITERS)

__all__ = ["STACKS", "Exported", "export"]


def export(stack: str, workload: Workload) -> Exported:
    """The export of this workload's model, recipe and layout to ``stack``."""
    if stack not in _WRITERS:
        raise BadInput(f"there is no export to {stack!r}", did_you_mean(stack, STACKS))
    recipe = workload.recipe
    if recipe.optimizer not in ("adamw", "sgd"):
        raise BadInput(
            f'recipe.optimizer = "{recipe.optimizer}": there is no export of it to {stack}',
            'recipe.optimizer = "adamw" or "sgd"',
        )
    for key in ("groups", "ema"):
        if getattr(recipe, key):
            raise BadInput(f"recipe.{key}: there is no export of it to {stack}", f"leave recipe.{key} out")
    return _WRITERS[stack](workload)
