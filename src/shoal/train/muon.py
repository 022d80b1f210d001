"""Muon: momentum, orthogonalised by Newton-Schulz iteration, updates the matrices of the hidden layers.

The iteration runs on the whole matrix in every layout (``parallel/whole_matrices.py``). AdamW updates everything else
(embeddings, head, norms and biases) with its own learning rate. Like torch's ``Muon`` with ``match_rms_adamw``: an
update is as large as AdamW's would be, so learning rates and weight decay mean the same in both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.facts.layout.whole_matrices import Matrix
from shoal.facts.optimizers import ITERATIONS, rule_of
from shoal.parallel.shards import Shard
from shoal.parallel.whole_matrices import WholeMatrices
from shoal.train.adamw import AdamW
from shoal.train.device_controlled import DeviceControlledOptimizer, wide

# Of the quintic iteration: steep at zero, so that a few iterations suffice.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
SMALLEST = 1e-7  # norm
# Root mean square of AdamW's usual updates, to which orthogonal matrices are scaled.
USUAL_RMS = 0.2


class Muon(DeviceControlledOptimizer):
    """``adamw`` updates its own groups; ``dtype`` is that of matrices when they are sent and orthogonalised."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        adamw: AdamW | None,
        whole: WholeMatrices,
        *,
        lr: float,
        momentum: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=0.0)
        self.matrices = whole.matrices(lambda name, dimensions: rule_of("muon", name, dimensions) == "muon")
        self.whole, self.dtype, self.adamw = whole, dtype, adamw
        self.options = {weight: group for group in self.param_groups for weight in group["params"]}
        for weight in self.options:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
        if adamw is not None:
            # Acts as one optimizer for everything that sets learning rates or saves and restores states.
            adamw.state = self.state
            self.param_groups.extend(adamw.param_groups)
            adamw.start()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.adamw is not None:
            self.adamw.found_inf, self.adamw.grad_scale = self.found_inf, self.grad_scale
            self.adamw.step()
        self.whole.change(self.matrices, self._direction, orthogonal, self._move, self.dtype)

    def _direction(self, piece: Shard, where: slice, matrix: Matrix) -> Tensor:
        """Nesterov momentum: the momentum as it will be after this gradient."""
        weight = piece.tensor
        decay = self.options[weight]["momentum"]
        buffer = self.state[weight]["momentum_buffer"].view(-1)[where]
        gradient = self.gradient(weight, where)
        mean = torch.lerp(gradient, wide(buffer), decay)
        self.settle(buffer, mean)
        return torch.lerp(gradient, mean, decay)

    def _move(self, piece: Shard, where: slice, matrix: Matrix, update: Tensor) -> None:
        options = self.options[piece.tensor]
        lr = options["lr"]
        value = piece.tensor.view(-1)[where]
        shrunk = wide(value) * (1 - lr * options["weight_decay"])
        scale = USUAL_RMS * math.sqrt(max(matrix.shape))
        self.settle_weight(piece.tensor, where, shrunk.sub_(update.to(shrunk.dtype), alpha=lr * scale))


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximately the nearest matrix whose singular values are all 1; they end up between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=SMALLEST)
    for _ in range(ITERATIONS):
        square = found @ found.T
        found = torch.addmm(found, torch.addmm(square, square, square, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found
