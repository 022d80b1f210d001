"""The weights that a run begins with: hashed, or those of a model directory, a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from shoal.facts.model import Model, hub
from shoal.facts.model.parameters import parameters
from shoal.facts.optimizers import AVERAGE
from shoal.facts.problem import BadInput
from shoal.models import initial
from shoal.models.huggingface import WeightFiles, fill_slices
from shoal.models.initial import Slice
from shoal.parallel.apply import Fill
from shoal.plan.resolve import Job
from shoal.train.checkpoint.listing import newest_sound
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.read import Checkpoint

NO_AVERAGE = "the weights themselves: leave out --ema, or set evaluate.ema = false"


def first_weights(job: Job) -> Fill:
    """Gives parameters the values that a run begins with."""
    origin = job.config.model.init_from
    if origin is not None:
        return weights_of(origin, job.model)

    def fill(slices: list[tuple[str, Slice]]) -> None:
        initial.fill(slices, job.model, job.config.recipe.seed)

    return fill


def weights_of(origin: str, model: Model, average: bool = False) -> Fill:
    """Gives parameters the values that they have there; each rank reads what it holds. Refused if they do not fit.

    ``average``: those of the average of the weights that ``recipe.ema`` keeps beside them in a checkpoint.
    """
    path = (
        hub.fetch(origin, hub.WEIGHTS, newest=False) if hub.is_hub_name(origin) else Path(origin).expanduser()
    )
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")) or not _is_ours(path):
        if average:
            raise BadInput(f"{origin} holds weights and no average of them", NO_AVERAGE)
        files = WeightFiles(path, model)

        def fill_from_files(slices: list[tuple[str, Slice]]) -> None:
            fill_slices(model, files.read, slices)
            files.close()

        return fill_from_files
    checkpoint = _open(path, model)
    state = AVERAGE if average else "weight"
    if average:
        check_average(checkpoint)

    def fill_from_checkpoint(slices: list[tuple[str, Slice]]) -> None:
        checkpoint.fill(model, [(state, name, part) for name, part in slices])

    return fill_from_checkpoint


def check_average(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of a run that kept no average."""
    if AVERAGE not in checkpoint.states:
        name = checkpoint.place.name(checkpoint.step)
        raise BadInput(f"{name} has no average of its weights: the run had no recipe.ema", NO_AVERAGE)


def _is_ours(path: Path) -> bool:
    """Whether it is a run or a checkpoint, by what lies in it."""
    return any((path / name).exists() for name in ("config.toml", "checkpoints", "manifest.json"))


def _open(path: Path, model: Model) -> Checkpoint:
    found = newest_sound(path)
    try:
        checkpoint = Checkpoint(found.place, found.step)
    except Damaged as error:
        raise BadInput(f"model.init_from: {error}", "another checkpoint: shoal checkpoint ls") from None
    for one in parameters(model):
        shape = checkpoint.manifest.shapes.get(one.name)
        if shape != one.shape:
            raise BadInput(
                f"model.init_from: {one.name} is {shape} in {found.name}, {model.name} has {one.shape}",
                f"model.path = {str(path)!r}",
            )
    return checkpoint
