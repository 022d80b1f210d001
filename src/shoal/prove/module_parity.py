"""Parity of a module that Shoal did not build: the same steps in each layout and on one process, in fp64.

The check of an architecture that Shoal was taught: a plan that splits a layer which it should not, or forgets to sum a
gradient, trains without an error and learns something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shoal.facts.layout import Layout
from shoal.facts.model.tensor_split import Box
from shoal.facts.problem import BadInput
from shoal.launch.library import launch
from shoal.parallel.shards import piece_boxes
from shoal.train.library.run import Run

# Of a loss, and of a tensor's largest element.
TOLERANCE = 1e-12
SMALLEST = 1e-30  # what is 0 everywhere is compared as it is
# Gradients that are nothing but rounding, as those of biases of keys, are measured against the largest of all.
OF_LARGEST = 1e-3


@dataclass(frozen=True)
class ModuleVerdict:
    """One layout against one process: the largest differences, relative to the loss or to a tensor's maximum."""

    layout: str
    losses: list[float]
    max_loss_diff: float
    max_grad_diff: float
    max_param_diff: float
    worst: str  # the parameter, or the gradient, that differs most
    ok: bool


@dataclass(frozen=True)
class _Part:
    name: str
    box: Box
    gradient: Tensor | None  # of the last step
    value: Tensor


@dataclass(frozen=True)
class _Trained:
    losses: list[float]
    parts: list[_Part]


def parity(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    layouts: str | Sequence[str | Layout],
    *,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.SGD,
    tolerance: float = TOLERANCE,
    timeout: float = 600.0,
    **options: Any,
) -> list[ModuleVerdict]:
    """Train ``build()`` in every layout and on one process, one step with each of ``batches``, and compare them.

    ``layouts``: as on the command line, "tp=2;fsdp=2". ``optimizer``: takes the parameters; torch's AdamW would
    turn a gradient that is nothing but rounding into a full step. ``batches``: of whole steps; floats in them and
    in the model become fp64. ``options``: those of ``run.prepare``, such as ``plan``. Modules that compute in fp32
    whatever their weights are, like some norms of ``transformers``, agree to 1e-6 at best: set ``tolerance`` for
    them.
    """
    asked = layouts.split(";") if isinstance(layouts, str) else layouts
    wanted = [one if isinstance(one, Layout) else Layout.parse(one) for one in asked]
    if not wanted or not len(batches):
        raise BadInput("parity needs a layout and a batch", 'shoal.parity(build, [batch], "tp=2;fsdp=2")')
    given = build, list(batches), loss, optimizer, options
    (whole,) = launch(_train, Layout(), *given, timeout=timeout)
    return [
        _compare(str(layout), whole, launch(_train, layout, *given, timeout=timeout), tolerance)
        for layout in wanted
    ]


def _train(
    run: Run,
    build: Callable[[], nn.Module],
    batches: list[Any],
    loss: Callable[[nn.Module, Any], Any] | None,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    options: dict[str, Any],
) -> _Trained:
    torch.manual_seed(0)
    model = build().double()
    prepared = run.prepare(model, optimizer(model.parameters()), **options)
    losses = [float(run.step(prepared[0], own_rows(batch, run, _widened), loss=loss)) for batch in batches]
    parts = []
    for piece in run.updated:
        gradient, begin = run.updated[piece].grad, 0
        for box, _ in piece_boxes(piece, 0, piece.stop - piece.start):
            own = Box(piece.box.whole, *box)
            here = slice(begin, begin := begin + own.size)
            made = None if gradient is None else gradient.detach().reshape(-1)[here].cpu()
            parts.append(_Part(piece.name, own, made, piece.tensor.detach().reshape(-1)[here].cpu()))
    return _Trained(losses, parts)


def own_rows(batch: Any, run: Run, made: Callable[[Tensor], Tensor]) -> Any:
    """This data rank's rows of every tensor of a batch, and what is ``made`` of them."""
    ranks, index = run.layout.data_ranks, run.mesh.data_index

    def share(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if tensor.shape[0] % ranks:
            raise BadInput(
                f"a batch of {tensor.shape[0]} rows does not divide by {ranks} data ranks", "another batch"
            )
        return made(tensor.chunk(ranks)[index])

    return _pytree.tree_map(share, batch)


def _widened(rows: Tensor) -> Tensor:
    return rows.double() if rows.is_floating_point() else rows


def _compare(layout: str, whole: _Trained, ranks: list[_Trained], tolerance: float) -> ModuleVerdict:
    losses = max(
        _known(abs(one - other) / max(abs(other), SMALLEST))
        for rank in ranks
        for one, other in zip(rank.losses, whole.losses, strict=True)
    )
    expected = {part.name: part for part in whole.parts}
    made = [one.gradient for one in whole.parts if one.gradient is not None and one.gradient.numel()]
    largest = max((_known(float(one.abs().max())) for one in made), default=0.0)
    gradients, values = _Worst(OF_LARGEST * largest), _Worst(SMALLEST)
    for part in (part for rank in ranks for part in rank.parts):
        other = expected[part.name]
        values.see(part.name, part.value, other.value, part.box)
        if (part.gradient is None) != (other.gradient is None):
            gradients.see(f"gradient of {part.name}", None, None, part.box)
        elif part.gradient is not None and other.gradient is not None:
            gradients.see(f"gradient of {part.name}", part.gradient, other.gradient, part.box)
    worst = max((gradients, values), key=lambda one: one.difference).name
    ok = max(losses, gradients.difference, values.difference) <= tolerance
    return ModuleVerdict(layout, ranks[0].losses, losses, gradients.difference, values.difference, worst, ok)


def _known(difference: float) -> float:
    """What is not a number would be neither more nor less than any, and so get lost among others."""
    return math.inf if math.isnan(difference) else difference


class _Worst:
    def __init__(self, least: float) -> None:
        """``least``: what differences are relative to, at least."""
        self.least, self.difference, self.name = max(least, SMALLEST), 0.0, ""

    def see(self, name: str, found: Tensor | None, whole: Tensor | None, box: Box) -> None:
        """A part of a tensor and the whole one; without them: one has it and the other has not."""
        difference = float("inf")
        if found is not None and whole is not None:
            part = whole.view(box.whole)[box.slices].reshape(-1)
            scale = max(float(whole.abs().max()), self.least) if whole.numel() else 1.0
            difference = _known(float((found - part).abs().max()) / scale) if part.numel() else 0.0
        if difference > self.difference:
            self.difference, self.name = difference, name
