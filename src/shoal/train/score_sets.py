"""The loss of trained weights on data sets, computed on all ranks of a layout, as during training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.train.data.collection import Collection
from shoal.train.data.samples import cut_samples
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.evaluate import heldout_loss
from shoal.train.first_weights import weights_of
from shoal.train.program import blueprint


@dataclass(frozen=True)
class EvaluationSet:
    """A named tokenised data set. ``whole``: score all of it, not only the validation set of that name."""

    name: str
    dataset: Path
    whole: bool


@dataclass(frozen=True)
class SetLoss:
    name: str
    loss: float | None  # nats per token; None: no targets
    samples: int


@torch.no_grad()
def score_sets(job: Job, mesh: Mesh, origin: str, sets: list[EvaluationSet], most: int) -> list[SetLoss]:
    """Each set's mean loss per token over ``most`` samples, spread evenly. ``origin``: where the weights are."""
    config, recipe = job.config, job.config.recipe
    network = blueprint(job.model, recipe)
    placed = apply(network, mesh, config.tune, weights_of(origin, job.model, config.evaluate.ema), recipe.seq)
    end = open_tokenizer(config.data.tokenizer, config.data.end_token).end
    micro, at_once = job.layout.micro_batch(recipe.batch), job.layout.accumulation(recipe.batch)
    losses = []
    for one in sets:
        cut = cut_samples(Collection.open(one.dataset), config.data, recipe.seq, end)
        samples = cut.train if one.whole else cut.validation.get(one.name)
        count = min(most, len(samples)) if samples is not None else 0
        loss = heldout_loss(placed, samples, mesh, count, micro, at_once) if samples and count else None
        losses.append(SetLoss(one.name, loss, count))
    return losses
