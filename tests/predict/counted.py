"""One rank's step on tensors without data: what the real parallel code holds at its fullest, counted.

A fake process group answers every collective at once, so any rank of any world runs in this process, and bf16 costs
nothing on a machine that computes it slowly.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor

from shoal.facts.clusters import find
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.ranks import coordinates
from shoal.facts.recipe import Recipe
from shoal.models.decoder import build
from shoal.observe.memory import MemoryTracker
from shoal.parallel.apply import Placed, apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.segment import MicroBatch
from shoal.predict.question import Question
from shoal.train.precision import compute_dtype, parameter_dtype, reduce_dtype

SHAPE: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": 2,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "ffn": 640,
    "vocab": 1000,
    "max_positions": 4096,
}
GPT2: dict[str, Any] = {
    "norm": "layer",
    "gated": False,
    "activation": "gelu",
    "positions": "learned",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def ask(
    layout: str, changes: dict[str, Any] | None = None, tune: dict[str, Any] | None = None, **recipe: Any
) -> Question:
    """A small model on CPUs."""
    parsed = Layout.parse(layout)
    return Question(
        Model(**{**SHAPE, **(changes or {})}),
        find(f"{parsed.world}xcpu"),
        Recipe(**{"seq": 512, "batch": 4, "steps": 1, **recipe}),
        parsed,
        tune=TuneSection(**(tune or {})),
    )


def stage_of(question: Question, rank: int) -> int:
    return coordinates(rank, question.layout)["pp"]


def counted(question: Question, rank: int = 0) -> dict[str, int]:
    """Peak bytes of the second step: params, grads, the batch, and all the rest under "other"."""
    with _fake_world(question.layout.world, rank):
        mesh = Mesh(question.layout, rank, torch.device("cpu"))
        recipe = question.recipe
        network = build(
            question.model,
            recipe.dropout,
            compute_dtype(recipe),
            dtype=parameter_dtype(recipe),
            length=recipe.seq,
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            placed = apply(network, mesh, question.tune, lambda _: None, recipe.seq, reduce_dtype(recipe))
            batches = [_batch(question) for _ in range(question.accumulation)]
            _step(placed, batches[:1])
            gc.collect()
            with MemoryTracker(fake=True) as tracker:
                _mark(tracker, placed, batches)
                tracker.reset_peak()
                _step(placed, batches)
                _mark(tracker, placed, batches)
                return tracker.peak_by_category()


def _mark(tracker: MemoryTracker, placed: Placed, batches: list[MicroBatch]) -> None:
    pieces = placed.gradients.pieces
    tracker.mark((tensor for batch in batches for tensor in (batch.tokens, batch.positions)), "batch")
    tracker.mark((batch.targets for batch in batches if batch.targets is not None), "batch")
    tracker.mark((part.local for _, part in placed.slices), "params")
    tracker.mark((piece.tensor for piece in pieces), "params")
    tracker.mark((piece.tensor.grad for piece in pieces if piece.tensor.grad is not None), "grads")


def _batch(question: Question) -> MicroBatch:
    size = question.micro, question.recipe.seq
    tokens, positions, targets = (torch.zeros(size, dtype=torch.int64) for _ in range(3))
    return MicroBatch(tokens, positions, None, targets, None)


def _step(placed: Placed, batches: list[MicroBatch]) -> None:
    """Without the update, which reads numbers off tensors that have none; it allocates nothing either."""
    placed.gradients.start_step()
    placed.executor.forward_backward(batches, 1.0)
    placed.gradients.finish_step()
    placed.shared.sum(placed.gradients.pieces)


@contextmanager
def _fake_world(world: int, rank: int) -> Iterator[None]:
    new_group, to_empty = dist.new_group, nn.Module.to_empty

    def fake_group(*arguments: Any, **options: Any) -> Any:
        return new_group(*arguments, **{**options, "backend": "fake"})

    def emptied(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        # torch swaps tensors in place here, which fake ones refuse once anything refers to them.
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return to_empty(module, device=device, recurse=recurse)
        made: dict[int, nn.Parameter] = {}
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False):
                fresh = partial(torch.empty_like, parameter, device=device)
                child._parameters[name] = made.setdefault(id(parameter), nn.Parameter(fresh()))
        return module

    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        with patch.object(dist, "new_group", fake_group), patch.object(nn.Module, "to_empty", emptied):
            yield
    finally:
        dist.destroy_process_group()
