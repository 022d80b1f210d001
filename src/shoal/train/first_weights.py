"""The weights that a run begins with: hashed, or those of a model directory, a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from shoal.facts.model import Model, hub
from shoal.facts.model.parameters import is_adapter, parameters
from shoal.facts.problem import BadInput
from shoal.models import initial
from shoal.models.huggingface import WeightFiles, fill_slices
from shoal.models.initial import Slice
from shoal.parallel.apply import Fill
from shoal.plan.resolve import Job
from shoal.train.checkpoint.listing import newest_sound
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.read import Checkpoint


def first_weights(job: Job) -> Fill:
    """Gives parameters the values that a run begins with."""
    origin = job.config.model.init_from
    read = None if origin is None else weights_of(origin, job.model)

    def fill(slices: list[tuple[str, Slice]]) -> None:
        hashed = [one for one in slices if read is None or is_adapter(one[0])]
        initial.fill(hashed, job.model, job.config.recipe.seed)
        if read is not None and len(hashed) < len(slices):
            read([one for one in slices if not is_adapter(one[0])])

    return fill


def weights_of(origin: str, model: Model) -> Fill:
    """Gives parameters the values that they have there; each rank reads what it holds. Refused if they do not fit."""
    path = (
        hub.fetch(origin, hub.WEIGHTS, newest=False) if hub.is_hub_name(origin) else Path(origin).expanduser()
    )
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")) or not _is_ours(path):
        files = WeightFiles(path, model)

        def fill_from_files(slices: list[tuple[str, Slice]]) -> None:
            fill_slices(model, files.read, slices)
            files.close()

        return fill_from_files
    checkpoint = _open(path, model)

    def fill_from_checkpoint(slices: list[tuple[str, Slice]]) -> None:
        checkpoint.fill(model, [("weight", name, part) for name, part in slices])

    return fill_from_checkpoint


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
