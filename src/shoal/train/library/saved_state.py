"""The state of a user's own module between steps: saved to and restored from a checkpoint in any layout.

A checkpoint has the format of ``shoal train``, under the module's own names: weights and buffers, the optimizer's
per-element states, and numbers. No pickle.
"""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.facts.model.checkpoint_views import View
from shoal.facts.problem import BadInput
from shoal.models.initial import Slice
from shoal.parallel.mesh import Mesh
from shoal.parallel.place_module import PlacedModule
from shoal.parallel.shards import Shard, piece_slices, weight
from shoal.train.checkpoint.manifest import (
    MODULE,
    MODULE_STATES,
    Damaged,
    Manifest,
    check_agrees,
    identity_hash,
)
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.staging import StagingBuffer, States
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.checkpoint.write_plan import parts_by_views

OPTIMIZER, SCHEDULED = "library.optimizer", "scheduler_steps"


class ModuleState:
    """What a resume needs. All ranks must call the same methods in the same order."""

    def __init__(
        self,
        placed: PlacedModule,
        optimizer: torch.optim.Optimizer | None,
        scheduler: LRScheduler | None,
        mesh: Mesh,
        name: str,
        updated: dict[Shard, nn.Parameter] | None = None,
    ) -> None:
        self.placed, self.optimizer, self.scheduler, self.mesh, self.name = (
            placed,
            optimizer,
            scheduler,
            mesh,
            name,
        )
        self.pieces = [*placed.pieces, *placed.kept]
        # For each piece, the parameter the optimizer updates.
        self.updated = {piece: piece.tensor for piece in placed.pieces} if updated is None else updated
        self.shapes = placed.shapes
        self.views = {
            name: [View(name, (0,) * len(shape), name, (0,) * len(shape), shape)]
            for name, shape in self.shapes.items()
        }

    def save(self, place: DirectoryStorage, step: int, samples: int) -> None:
        """Returns when it is committed."""
        kinds, numbers = self._kinds()
        listed = {
            kind: sorted(names)
            for kind, names in self._everywhere({k: sorted(v) for k, v in kinds.items()}).items()
        }
        scalars = {"updates": float(step), "loss_scale": 1.0, "quiet_steps": 0.0, **self._everywhere(numbers)}
        if self.scheduler is not None:
            scalars[SCHEDULED] = float(self.scheduler.last_epoch)
        identity = {**self._identity(), MODULE_STATES: listed}
        manifest = Manifest(
            step=step,
            samples=samples,
            model={"module": self.name},
            identity=identity,
            recipe=identity_hash(identity),
            scalars=scalars,
            shapes=self.shapes,
            pieces=(),
        )
        mine = parts_by_views(self.views, self.pieces, self.mesh)
        stage = StagingBuffer(mine, self.mesh.device, 1 + len(listed), ahead=False)
        attempt = self.mesh.hosts.broadcast(uuid.uuid4().hex)
        saver = Saver(f"library-{attempt}", place, stage, self.mesh, attempt)
        states: States = [
            ("weight", weight),
            *((kind, partial(self._state, kind)) for kind in sorted(listed)),
        ]
        saver.start(manifest, states)
        saver.finish()
        (saved,) = saver.take_results()
        saver.close()
        # Only the first rank knows whether there was a commit.
        if error := self.mesh.hosts.broadcast(saved.error):
            raise BadInput(
                f"step {step} was not saved: {error}", "make room, or another directory, and save again"
            )

    def restore(self, place: DirectoryStorage) -> int:
        """Restore the newest intact state of a place; returns its step, or 0 if there is none."""
        found = self._newest(place) if self.mesh.rank == 0 else 0
        step = int(self.mesh.hosts.broadcast(str(found)))
        if not step:
            return 0
        checkpoint = Checkpoint(place, step, share=(self.mesh.rank, self.mesh.world))
        manifest = checkpoint.manifest
        check_agrees(manifest, place.name(step))
        self._check_same(manifest, place.name(step))
        weights = [
            ("weight", piece.name, part)
            for piece in self.pieces
            for part in piece_slices(piece, piece.tensor)
        ]
        checkpoint.fill_by_views(self.views, [*weights, *self._states_to_fill(checkpoint)])
        for piece in self.placed.pieces if self.optimizer is not None else ():
            self._restore_numbers(piece, manifest.scalars)
        self.placed.after_update()
        if self.scheduler is not None:
            _replay(self.scheduler, int(manifest.scalars.get(SCHEDULED, 0)))
        # No rank continues, and perhaps saves over it, before all have read.
        self.mesh.hosts.sum_integers([0])
        return step

    def _identity(self) -> dict[str, Any]:
        optimizer = None if self.optimizer is None else type(self.optimizer).__name__
        return {MODULE: self.name, OPTIMIZER: optimizer}

    def _everywhere(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Merge all ranks' dictionaries; lists are concatenated."""
        together: dict[str, Any] = {}
        for text in self.mesh.hosts.all_gather(json.dumps(mine)):
            for key, value in json.loads(text).items():
                if isinstance(value, list) and key in together and all(isinstance(one, str) for one in value):
                    together[key] = sorted({*together[key], *value})
                else:
                    together[key] = value
        return together

    def _kinds(self) -> tuple[dict[str, set[str]], dict[str, float]]:
        """The optimizer's states: per-element ones by name, for each piece, and numbers."""
        kinds: dict[str, set[str]] = {}
        numbers: dict[str, float] = {}
        for piece in self.placed.pieces:
            state = {} if self.optimizer is None else self.optimizer.state.get(self.updated[piece], {})
            for kind, value in state.items():
                if value is None:
                    continue
                if isinstance(value, Tensor) and value.shape == piece.tensor.shape and kind != "step":
                    kinds.setdefault(kind, set()).add(piece.name)
                elif not isinstance(value, Tensor) or value.numel() == 1:
                    numbers[f"{kind} of {piece.name}"] = float(value)
                else:
                    raise BadInput(
                        f"{self._identity()[OPTIMIZER]} keeps {kind} of another shape than {piece.name}: "
                        "it cannot be saved for another layout",
                        "an optimizer that keeps states for each element, such as AdamW",
                    )
        return kinds, numbers

    def _state(self, kind: str, piece: Shard) -> Tensor | None:
        assert self.optimizer is not None
        # Parameters that are not updated have no states.
        found = self.optimizer.state.get(self.updated.get(piece, piece.tensor), {}).get(kind)
        return found if isinstance(found, Tensor) and found.shape == piece.tensor.shape else None

    def _states_to_fill(self, checkpoint: Checkpoint) -> Iterator[tuple[str, str, Slice]]:
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        for kind, names in checkpoint.manifest.identity[MODULE_STATES].items():
            for piece in self.placed.pieces:
                if piece.name in names:
                    dtype = checkpoint.dtype(kind, piece.name)
                    state = torch.zeros_like(self.updated[piece], dtype=dtype, requires_grad=False)
                    self.optimizer.state[self.updated[piece]][kind] = state
                    for part in piece_slices(piece, state):
                        yield kind, piece.name, part

    def _restore_numbers(self, piece: Shard, scalars: dict[str, float]) -> None:
        assert self.optimizer is not None
        own = self.updated[piece]
        groups = (group for group in self.optimizer.param_groups if any(p is own for p in group["params"]))
        group = next(groups, {})
        on_device = bool(group.get("fused") or group.get("capturable"))
        for key, value in scalars.items():
            kind, found, name = key.partition(" of ")
            if found and name == piece.name:
                device = own.device if on_device else torch.device("cpu")
                number = torch.tensor(value, dtype=torch.float32, device=device)
                self.optimizer.state[own][kind] = number

    def _newest(self, place: DirectoryStorage) -> int:
        """On the first rank: the newest intact state; damaged ones are set aside."""
        place.clear()
        damage = ""
        for step in reversed(place.committed()):
            try:
                Checkpoint(place, step).verify()
                return step
            except Damaged as error:
                damage = str(error)
                place.set_aside(step, damage)
        if damage:
            raise Damaged(f"no sound checkpoint is left. The last one: {damage}")
        return 0

    def _check_same(self, manifest: Manifest, where: str) -> None:
        ours, theirs = self._identity(), manifest.identity
        for key, word in ((MODULE, "model"), (OPTIMIZER, "optimizer")):
            if ours[key] != theirs.get(key):
                raise BadInput(
                    f"{where} is of the {word} {theirs.get(key)}, this script has {ours[key]}",
                    "the same script, or another dir=",
                )
        if manifest.shapes != self.shapes:
            names = {**self.shapes, **manifest.shapes}
            name = next(name for name in names if self.shapes.get(name) != manifest.shapes.get(name))
            raise BadInput(
                f"{where}: {name} is {manifest.shapes.get(name)} there and {self.shapes.get(name)} in this model",
                "the same model, or another dir=",
            )


def _replay(scheduler: LRScheduler, steps: int) -> None:
    """Replay a scheduler's steps, which restores its learning rate."""
    with warnings.catch_warnings():
        # It would warn that no update came before them.
        warnings.simplefilter("ignore")
        while scheduler.last_epoch < steps:
            scheduler.step()
