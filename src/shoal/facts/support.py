"""What the engine runs today. A config may name more than that; it is refused here, before anything is spawned."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem


def check(config: Config, model: Model, layout: Layout) -> None:
    """Raise one ``BadInput`` that holds everything asked for that the engine does not run yet."""
    problems = [
        Problem(f"{what} is not run by this version of Shoal", fix)
        for what, fix in _missing(config, model, layout)
    ]
    if problems:
        raise BadInput(problems)


def _missing(config: Config, model: Model, layout: Layout) -> Iterator[tuple[str, str]]:
    for axis in ("fsdp", "tp", "cp", "pp", "ep"):
        if getattr(layout, axis) > 1:
            yield f"layout: {axis}={getattr(layout, axis)}", f"{axis}=1; dp=N runs"
    if layout.recompute != "none":
        yield f"layout: recompute={layout.recompute}", "recompute=none"
    if layout.offload:
        yield "layout: offload", "offload=none"
    if model.experts is not None or model.latent is not None:
        yield f"model {model.name}: training a mixture of experts or latent attention", "a dense model"
    if config.run.strict:
        yield "run.strict", "run.strict = false"
    if config.model.lora is not None:
        yield "model.lora", "leave it out"
    if config.data.mix:
        yield "data.mix", 'one data.source, such as "data/*.jsonl"'
    if config.recipe.precision == "fp8":
        yield "recipe.precision = fp8", 'recipe.precision = "bf16"'
    if config.recipe.states == "int8":
        yield "recipe.states = int8", 'recipe.states = "bf16"'
    if config.compile.enabled:
        yield "compile.enabled", "compile.enabled = false"
    if config.checkpoint.background:
        yield "checkpoint.background", "checkpoint.background = false"
    for tracker in ("tensorboard", "wandb", "mlflow", "trackio"):
        if getattr(config.track, tracker):
            yield f"track.{tracker}", f"track.{tracker} = false; metrics.jsonl holds every step"
