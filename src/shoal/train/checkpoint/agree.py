"""Check that a manifest is consistent: its model with its tensors, its samples with its recipe. Needs no torch.

Its hash shows what was changed by accident. A change on purpose comes with a new hash, but has to be made everywhere:
what is written down twice must be the same twice.
"""

from __future__ import annotations

import json
from itertools import zip_longest

from pydantic import ValidationError

from shoal.facts.model import Model
from shoal.facts.parameters import parameters
from shoal.train.checkpoint.manifest import Damaged, Manifest, identity_hash

SCALARS = {"updates", "loss_scale", "quiet_steps"}
BATCH = "recipe.batch"


def check_agrees(manifest: Manifest, where: str, of_run: Model | None = None) -> None:
    """Refuse a manifest whose parts contradict each other. ``where``: for messages.

    ``of_run``: the model of the run that it lies in, where that is known.
    """
    model = _model(manifest, where)
    _check_tensors(model, manifest, where)
    if of_run is not None and model != of_run.model_copy(update={"name": model.name}):
        different = (
            name
            for name in Model.model_fields
            if name != "name" and getattr(model, name) != getattr(of_run, name)
        )
        changed = "; ".join(
            f"{name} is {getattr(model, name)!r}, there {getattr(of_run, name)!r}" for name in different
        )
        raise Damaged(f"{where}: its model is not that of its run: {changed}")
    if identity_hash(manifest.identity) != manifest.recipe:
        raise Damaged(f"{where}: the recipe was changed: its hash does not match")
    batch = manifest.identity.get(BATCH)
    if isinstance(batch, int) and manifest.samples != manifest.step * batch:
        raise Damaged(
            f"{where} says {manifest.samples} samples were used; {manifest.step} steps of {batch} are "
            f"{manifest.step * batch}"
        )
    scalars = manifest.scalars
    if missing := SCALARS - scalars.keys():
        raise Damaged(f"{where} lacks {', '.join(sorted(missing))}")
    counted = scalars["updates"], scalars["quiet_steps"]
    if any(count < 0 or not count.is_integer() for count in counted) or scalars["loss_scale"] <= 0:
        raise Damaged(f"{where} holds numbers that no run has: {scalars}")


def _model(manifest: Manifest, where: str) -> Model:
    try:
        return Model.model_validate_json(json.dumps(manifest.model), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise Damaged(f"{where}: its model is none: {key}: {first['msg']}") from None


def _check_tensors(model: Model, manifest: Manifest, where: str) -> None:
    # Side by side, and no further than the first that differs: a model may claim to have millions of tensors.
    for parameter, found in zip_longest(parameters(model), manifest.shapes.items()):
        ours = (parameter.name, parameter.shape) if parameter is not None else None
        if ours != found:
            raise Damaged(
                f"{where}: its model was changed: it has {_words(ours)}, the tensors are {_words(found)}"
            )


def _words(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "no more" if tensor is None else f"{tensor[0]} of {list(tensor[1])}"
