"""A network after a few updates, and its checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.models.decoder import build
from shoal.models.initial import fill
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.train import optimizer as optimizers
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.optimizer import LossScale
from shoal.train.state import State


def make_state(
    model: Model, seed: int = 0, steps: int = 2, recipe: Recipe | None = None, mesh: Mesh | None = None
) -> State:
    """A network after a few updates, so that optimizer states hold something."""
    recipe = recipe or Recipe()
    mesh = mesh or Mesh(Layout(), 0, torch.device("cpu"))
    placed = apply(build(model), mesh, TuneSection(), partial(fill, model=model, seed=seed), seq=10)
    pieces = placed.gradients.pieces
    optimizer = optimizers.build(pieces, recipe)
    for step in range(steps):
        for number, piece in enumerate(pieces):
            piece.tensor.grad = torch.full_like(piece.tensor, 0.1 * (number + step + 1))
        optimizer.step()
    return State(model, placed, optimizer, recipe, LossScale(), mesh)


def commit(
    state: State,
    checkpoints: Path,
    step: int,
    samples: int,
    identity: dict[str, Any],
    heldout_loss: float | None = None,
) -> Path:
    place = DirectoryStorage(checkpoints)
    saver = Saver("disk", place, state.new_stage(), state.mesh, "test")
    saver.start(state.manifest(step, samples, identity, heldout_loss), state.states())
    saver.finish()
    (saved,) = saver.take_results()
    if saved.error:
        raise OSError(saved.error)
    return place.at(step)
