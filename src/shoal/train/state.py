"""What a run is between two steps, and its way into a checkpoint and out of it again, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.facts.model import Model
from shoal.facts.recipe import OPTIMIZER_STATES
from shoal.models.huggingface import by_tensor, fill_slices, to_tensor
from shoal.models.initial import Slice
from shoal.parallel.apply import Placed
from shoal.parallel.collect import Collector
from shoal.parallel.mesh import Mesh
from shoal.parallel.pieces import Piece, weight
from shoal.train.checkpoint.manifest import Damaged, Manifest
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.write import write_checkpoint
from shoal.train.optimizer import LossScale


class State:
    """Weights, optimizer states and the few numbers beside them. All else is a function of the recipe and the step."""

    def __init__(
        self,
        model: Model,
        placed: Placed,
        optimizer: torch.optim.Optimizer,
        kind: str,
        scale: LossScale,
        mesh: Mesh,
    ) -> None:
        self.model = model
        self.placed = placed
        self.pieces = placed.gradients.pieces
        self.optimizer = optimizer
        self.kinds = OPTIMIZER_STATES[kind]
        self.scale = scale
        self.first_rank = mesh.rank == 0
        self.collector = Collector(self.pieces, mesh)

    def commit(self, checkpoints: Path, step: int, samples: int, identity: dict[str, Any]) -> None:
        """Make a checkpoint. All ranks give what they hold; the first one writes."""
        tensors = self._tensors(self._kinds_here())
        if not self.first_rank:
            for _ in tensors:
                pass
            return
        manifest = Manifest(
            step=step,
            samples=samples,
            model=self.model.model_dump(mode="json"),
            identity=identity,
            scalars={
                "updates": self._updates(),
                "loss_scale": self.scale.value,
                "quiet_steps": self.scale.quiet,
            },
            shapes={},
            pieces=(),
        )
        write_checkpoint(checkpoints, manifest, tensors)

    def restore(self, path: Path) -> int:
        """Become the state of a checkpoint, whichever layout wrote it; return its step."""
        checkpoint = Checkpoint(path)
        scalars = checkpoint.manifest.scalars
        fill_slices(self.model, lambda name: checkpoint.tensor("weight", name), self.placed.slices)
        states = checkpoint.states - {"weight"}
        if states and states != set(self.kinds):
            raise Damaged(
                f"{path} holds {', '.join(sorted(states))}; this optimizer needs {', '.join(self.kinds)}"
            )
        if states:
            for kind in self.kinds:
                self._restore_states(kind, checkpoint)
        if "exp_avg" in states:
            for piece in self.pieces:
                # A tensor, as torch's fused AdamW keeps it: on the parameter's device.
                updates = torch.tensor(scalars["updates"], dtype=torch.float32, device=piece.tensor.device)
                self.optimizer.state[piece.tensor]["step"] = updates
        self.scale.value = scalars["loss_scale"]
        self.scale.quiet = int(scalars["quiet_steps"])
        return checkpoint.manifest.step

    def _restore_states(self, kind: str, checkpoint: Checkpoint) -> None:
        """One optimizer state of every piece: the rows it lies in are read, and of those its elements kept."""
        covers = [(piece, *_rows_around(piece)) for piece in self.pieces]
        slices = [(piece.name, rows) for piece, rows, _ in covers]
        fill_slices(self.model, lambda name: checkpoint.tensor(kind, name), slices)
        for piece, rows, skipped in covers:
            elements = rows.local.reshape(-1)[skipped : skipped + piece.stop - piece.start]
            state = torch.empty_like(piece.tensor, requires_grad=False)
            self.optimizer.state[piece.tensor][kind] = state.copy_(elements.view_as(state))

    def _tensors(self, kinds: tuple[str, ...]) -> Iterator[tuple[str, str, Tensor]]:
        """Hugging Face's tensors one at a time on the first rank; nothing on others, which take part all the same."""
        for kind in ("weight", *kinds):
            value = weight if kind == "weight" else self._state(kind)
            for name, boxes in by_tensor(self.model):
                names = dict.fromkeys(box.canonical for box in boxes)
                parts = {part: self.collector.whole(part, value) for part in names}
                wholes = {part: tensor for part, tensor in parts.items() if tensor is not None}
                if wholes:
                    yield kind, name, to_tensor(boxes, wholes)

    def _kinds_here(self) -> tuple[str, ...]:
        """The optimizer states there are: none before the first update, and no momentum where it is 0."""
        states = [self.optimizer.state.get(piece.tensor, {}) for piece in self.pieces]
        return tuple(kind for kind in self.kinds if any(state.get(kind) is not None for state in states))

    def _state(self, kind: str) -> Callable[[Piece], Tensor]:
        def value(piece: Piece) -> Tensor:
            state: Tensor = self.optimizer.state[piece.tensor][kind]
            return state

        return value

    def _updates(self) -> float:
        """Updates made so far; fewer than steps where some were skipped."""
        first = self.pieces[0].tensor
        return float(self.optimizer.state.get(first, {}).get("step", 0.0))


def _rows_around(piece: Piece) -> tuple[Slice, int]:
    """Whole rows that hold a piece, still empty, and how many of their elements come before it."""
    box = piece.box
    width = box.size // box.shape[0] if box.shape[0] else 1
    first, last = piece.start // width, -(-piece.stop // width)
    local = torch.empty((last - first, *box.shape[1:]), dtype=piece.tensor.dtype, device=piece.tensor.device)
    offset = (box.offset[0] + first, *box.offset[1:])
    return Slice(local, box.whole, offset), piece.start - first * width
