"""A run's state between steps: saved to a checkpoint and restored from one in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.facts.model import Model
from shoal.facts.model.parameters import parameters
from shoal.facts.optimizers import AVERAGE, COUNTING, OF_MATRICES, rule_of
from shoal.facts.recipe import Recipe
from shoal.facts.stored_states import Keeps, expected_states
from shoal.models.initial import Slice
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard, piece_slices
from shoal.train.adamw import AdamW
from shoal.train.checkpoint.manifest import Damaged, Manifest, check_agrees, identity_hash
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.staging import StagingBuffer, States
from shoal.train.checkpoint.write_plan import factor_parts, parts
from shoal.train.factors import empty_state, factor_slices
from shoal.train.optimizer import LossScale, start_filed, start_momentum


class Updated(Protocol):
    """What a rank's optimizer updates, and what follows from it."""

    @property
    def gradients(self) -> HasPieces: ...

    @property
    def frozen(self) -> Sequence[tuple[str, Slice]]: ...

    @property
    def still(self) -> Sequence[Shard]: ...

    def after_update(self) -> None: ...


class HasPieces(Protocol):
    pieces: list[Shard]


class State:
    """Weights, optimizer states and a few numbers. Everything else is a function of the recipe and the step."""

    def __init__(
        self,
        model: Model,
        placed: Updated,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        scale: LossScale,
        mesh: Mesh,
    ) -> None:
        self.model = model
        self.placed = placed
        self.pieces = placed.gradients.pieces
        self.optimizer = optimizer
        self.keeps = Keeps.of(recipe)
        self.kinds = expected_states(model, self.keeps)
        self.scale = scale
        self.mesh = mesh

    def new_stage(self, ahead: bool = True, tell: Callable[[str], None] = print) -> StagingBuffer:
        """A staging buffer for this rank's share of the state. ``ahead``: allocate it before it is needed."""
        mine = parts(self.model, [*self.pieces, *self.placed.still], self.mesh)
        factors = {kind: factor_parts(self.pieces, kind) for kind in self.kinds if kind in OF_MATRICES}
        # States too large for memory are not copied in memory either: their copy is on the same disk until it is
        # written.
        on_disk = next((piece.filed.mapped for piece in self.pieces if piece.filed is not None), None)
        return StagingBuffer(mine, self.mesh.device, 1 + len(self.kinds), ahead, tell, factors, on_disk)

    def states(self) -> States:
        """Weights, and the optimizer states that exist."""
        kinds = ((kind, partial(self._state, kind)) for kind in self._kinds_here())
        return [("weight", lambda piece: piece.tensor), *kinds]

    def manifest(
        self, step: int, samples: int, identity: dict[str, Any], heldout_loss: float | None = None
    ) -> Manifest:
        """Describe the state after ``step``; its pieces are added as they are written."""
        return Manifest(
            step=step,
            samples=samples,
            model=self.model.model_dump(mode="json"),
            identity=identity,
            recipe=identity_hash(identity),
            scalars={
                "updates": self._updates(),
                "loss_scale": self.scale.value,
                "quiet_steps": self.scale.quiet,
            },
            heldout_loss=heldout_loss,
            shapes={parameter.name: parameter.shape for parameter in parameters(self.model)},
            pieces=(),
        )

    def restore(self, checkpoint: Checkpoint) -> int:
        """Restore the state of a checkpoint, whichever layout wrote it; returns its step.

        The network's weights are set when all ranks have read what they need (``settle``).
        """
        check_agrees(checkpoint.manifest, checkpoint.place.name(checkpoint.step))
        scalars = checkpoint.manifest.scalars
        found = checkpoint.states - {"weight"}
        begun = found - {AVERAGE}  # an optimizer may have no states yet; the average always exists
        if begun and found != set(self.kinds):
            raise Damaged(
                f"{checkpoint.place.name(checkpoint.step)} holds {', '.join(sorted(found))}; "
                f"this optimizer needs {', '.join(self.kinds)}"
            )
        weights = [
            ("weight", piece.name, part)
            for piece in self.pieces
            if piece.filed is None
            for part in piece_slices(piece, piece.tensor)
        ]
        if self.model.adapters is None:  # frozen weights under adapters are in no checkpoint
            weights += [("weight", name, part) for name, part in self.placed.frozen]
        self.optimizer.state.clear()
        if isinstance(self.optimizer, AdamW):
            start_filed(self.optimizer, self.pieces)
        checkpoint.fill(self.model, [*weights, *self._states_to_fill(found)])
        self._fill_files(checkpoint, found)
        if self.keeps.optimizer == "sgd" and not begun:
            # Written before the first update, by a version whose optimizer had no momentum yet.
            start_momentum(self.optimizer, self.pieces)
        for piece in self.pieces if begun else ():
            if rule_of(self.keeps.optimizer, piece.name, len(piece.box.whole)) in COUNTING:
                # A tensor on the parameter's device, as torch's fused AdamW keeps it.
                updates = torch.tensor(scalars["updates"], dtype=torch.float32, device=piece.tensor.device)
                self.optimizer.state[piece.tensor]["step"] = updates
        self.scale.value = scalars["loss_scale"]
        self.scale.quiet = int(scalars["quiet_steps"])
        return checkpoint.manifest.step

    def settle(self) -> None:
        """All ranks have restored the same state: give the network its weights."""
        self.placed.after_update()

    def _states_to_fill(self, kinds: set[str]) -> Iterator[tuple[str, str, Slice]]:
        for kind in sorted(kinds):
            for piece in self.pieces:
                if piece.filed is not None or not self._has(piece, kind):
                    continue
                state = empty_state(piece, kind, self.keeps)
                self.optimizer.state[piece.tensor][kind] = state
                slices = (
                    factor_slices(piece, state, kind) if kind in OF_MATRICES else piece_slices(piece, state)
                )
                for part in slices:
                    yield kind, piece.name, part

    def _fill_files(self, checkpoint: Checkpoint, kinds: set[str]) -> None:
        """Restore one state of one piece at a time: memory has no room for all of them."""
        for piece in self.pieces:
            if piece.filed is None:
                continue
            for kind in sorted(kinds | {"weight"}):
                if kind != "weight" and not self._has(piece, kind):
                    continue
                values = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype)
                checkpoint.fill(
                    self.model, [(kind, piece.name, part) for part in piece_slices(piece, values)]
                )
                if kind != "weight":
                    self.optimizer.state[piece.tensor][kind] = piece.filed.begin(kind)
                piece.filed.write(kind, values)

    def _has(self, piece: Shard, kind: str) -> bool:
        return kind in self.keeps.states(piece.name, len(piece.box.whole))

    def _kinds_here(self) -> tuple[str, ...]:
        """The optimizer states that exist: none before the first update, and no momentum if it is 0."""
        states = [self.optimizer.state.get(piece.tensor, {}) for piece in self.pieces]
        return tuple(kind for kind in self.kinds if any(state.get(kind) is not None for state in states))

    def _state(self, kind: str, piece: Shard) -> Tensor | None:
        state: Tensor | None = self.optimizer.state.get(piece.tensor, {}).get(kind)
        return state

    def _updates(self) -> float:
        """Updates made so far; fewer than steps if some were skipped."""
        every = (self.optimizer.state.get(piece.tensor, {}).get("step") for piece in self.pieces)
        counts = [torch.as_tensor(step) for step in every if step is not None]
        # Read once per device, because reading synchronises.
        devices = {count.device for count in counts}
        most = (torch.stack([count for count in counts if count.device == one]).max() for one in devices)
        return max(map(float, most), default=0.0)
