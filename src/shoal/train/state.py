"""What a run is between two steps, and its way into a checkpoint and out of it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.facts.model import Model
from shoal.facts.recipe import OPTIMIZER_STATES
from shoal.models.huggingface import from_tensors, to_tensors
from shoal.train.checkpoint.manifest import Damaged, Manifest
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.write import write_checkpoint
from shoal.train.optimizer import LossScale


class State:
    """Weights, optimizer states and the few numbers beside them. All else is a function of the recipe and the step."""

    def __init__(
        self, model: Model, network: nn.Module, optimizer: torch.optim.Optimizer, kind: str, scale: LossScale
    ) -> None:
        self.model = model
        self.parameters = dict(network.named_parameters())
        self.optimizer = optimizer
        self.kinds = OPTIMIZER_STATES[kind]
        self.scale = scale

    def commit(self, checkpoints: Path, step: int, samples: int, identity: dict[str, Any]) -> Path:
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
        return write_checkpoint(checkpoints, manifest, self._tensors())

    def restore(self, path: Path) -> int:
        """Become the state of a checkpoint; return its step."""
        checkpoint = Checkpoint(path)
        scalars = checkpoint.manifest.scalars
        self._fill("weight", self.parameters, checkpoint)
        states = checkpoint.states - {"weight"}
        if states and states != set(self.kinds):
            raise Damaged(
                f"{path} holds {', '.join(sorted(states))}; this optimizer needs {', '.join(self.kinds)}"
            )
        if states:
            for kind in self.kinds:
                self._fill(kind, self._optimizer_tensors(kind, create=True), checkpoint)
        if "exp_avg" in states:
            for parameter in self.parameters.values():
                # A tensor, as torch's fused AdamW keeps it: on the parameter's device.
                updates = torch.tensor(scalars["updates"], dtype=torch.float32, device=parameter.device)
                self.optimizer.state[parameter]["step"] = updates
        self.scale.value = scalars["loss_scale"]
        self.scale.quiet = int(scalars["quiet_steps"])
        return checkpoint.manifest.step

    def _fill(self, kind: str, tensors: dict[str, Any], checkpoint: Checkpoint) -> None:
        from_tensors(self.model, lambda name: checkpoint.tensor(kind, name), tensors)

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        kinds = [kind for kind in self.kinds if self._optimizer_tensors(kind)]
        with torch.no_grad():
            for name, tensor in to_tensors(self.model, self.parameters):
                yield "weight", name, tensor
            for kind in kinds:
                for name, tensor in to_tensors(self.model, self._optimizer_tensors(kind)):
                    yield kind, name, tensor

    def _optimizer_tensors(self, kind: str, create: bool = False) -> dict[str, Tensor]:
        """One optimizer state of every parameter; empty before the first update."""
        tensors = {}
        for name, parameter in self.parameters.items():
            states = self.optimizer.state[parameter] if create else self.optimizer.state.get(parameter, {})
            if create:
                states[kind] = torch.empty_like(parameter, requires_grad=False)
            if states.get(kind) is not None:
                tensors[name] = states[kind]
        return tensors

    def _updates(self) -> float:
        """Updates made so far; fewer than steps where some were skipped."""
        first = next(iter(self.parameters.values()))
        return float(self.optimizer.state.get(first, {}).get("step", 0.0))
