"""The weights that a run begins with: hashed, or from a model directory, a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from shoal.facts.model import Model, hub
from shoal.facts.model.parameters import is_adapter, parameters
from shoal.facts.optimizers import AVERAGE
from shoal.facts.problem import BadInput
from shoal.models import initial
from shoal.models.huggingface import WeightFiles, fill_slices
from shoal.models.initial import Fill, Slice
from shoal.plan.resolve import Job
from shoal.train.checkpoint.listing import newest_sound
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.fingerprint import weights_fingerprint
from shoal.train.huggingface.peft_files import PeftFiles
from shoal.train.merged import in_nf4, merged, with_lengths
from shoal.train.program import compute_dtype
from shoal.train.run_directory import WEIGHTS, WEIGHTS_HASH

NO_AVERAGE = "the weights themselves: leave out --ema, or set evaluate.ema = false"


def first_weights(job: Job) -> Fill:
    """Returns the function that initialises trained parameters and fills the frozen ones."""
    config = job.config.model
    base = _base(config.init_from, job.model, job.config.recipe.seed)
    adapters = _base(None, job.model, job.config.recipe.seed)
    if config.lora is not None and config.lora.kind == "dora":
        used = in_nf4(base, job.model) if config.lora.base == "nf4" else base
        adapters = with_lengths(adapters, used, job.model, compute_dtype(job.config.recipe))
    if config.lora is not None and config.lora.init_from is not None:
        adapters = PeftFiles(Path(config.lora.init_from).expanduser(), job.network).fill

    def fill(slices: list[tuple[str, Slice]]) -> None:
        for give, wanted in ((base, False), (adapters, True)):
            if chosen := [one for one in slices if is_adapter(one[0]) == wanted]:
                give(chosen)

    return fill


def _base(origin: str | None, model: Model, seed: int) -> Fill:
    if origin is not None:
        return weights_of(origin, model)

    def fill(slices: list[tuple[str, Slice]]) -> None:
        initial.fill(slices, model, seed)

    return fill


def weights_of(origin: str, model: Model, average: bool = False) -> Fill:
    """Returns a function that fills parameters from ``origin``; each rank reads only what it holds. Refused if shapes
    do not fit.

    A run that trained adapters is merged with its base. ``average``: read the averaged weights that ``recipe.ema``
    keeps in a checkpoint.
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
    checkpoint = _open(path)
    if average:
        check_average(checkpoint)
    state = AVERAGE if average else "weight"
    if checkpoint.manifest.parsed_model.adapters is not None:
        return merged_weights(checkpoint, state)
    _check_shapes(checkpoint, model, path)

    def fill_from_checkpoint(slices: list[tuple[str, Slice]]) -> None:
        checkpoint.fill(model, [(state, name, part) for name, part in slices])

    return fill_from_checkpoint


def check_average(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of a run that kept no average."""
    if AVERAGE not in checkpoint.states:
        name = checkpoint.place.name(checkpoint.step)
        raise BadInput(f"{name} has no average of its weights: the run had no recipe.ema", NO_AVERAGE)


def merged_weights(checkpoint: Checkpoint, state: str = "weight") -> Fill:
    """The merged weights of a checkpoint with adapters; its identity names their base."""
    manifest = checkpoint.manifest
    model, origin = manifest.parsed_model, manifest.identity.get(WEIGHTS)
    if origin is not None and weights_fingerprint(origin) != manifest.identity.get(WEIGHTS_HASH):
        raise BadInput(
            f"{checkpoint.place.name(checkpoint.step)} has adapters beside the weights of {origin}, "
            "which are not there, or are others now",
            "put them back",
        )
    base = _base(origin, model.base, manifest.identity["recipe.seed"])
    if model.adapters is not None and model.adapters.base == "nf4":
        base = in_nf4(base, model)
    return merged(checkpoint, model, base, state)


def _is_ours(path: Path) -> bool:
    """Whether the path is a run or a checkpoint, judged by its contents."""
    return any((path / name).exists() for name in ("config.toml", "checkpoints", "manifest.json"))


def _open(path: Path) -> Checkpoint:
    found = newest_sound(path)
    try:
        return Checkpoint(found.place, found.step)
    except Damaged as error:
        raise BadInput(f"model.init_from: {error}", "another checkpoint: shoal checkpoint ls") from None


def _check_shapes(checkpoint: Checkpoint, model: Model, path: Path) -> None:
    for one in parameters(model):
        shape = checkpoint.manifest.shapes.get(one.name)
        if shape != one.shape:
            name = checkpoint.place.name(checkpoint.step)
            raise BadInput(
                f"model.init_from: {one.name} is {shape} in {name}, {model.name} has {one.shape}",
                f"model.path = {str(path)!r}",
            )
