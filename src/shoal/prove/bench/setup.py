"""What every peer gets: the job, its place among the ranks, its rows, and what all must do alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.models import initial
from shoal.models.rotary import tables
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.plain_decoder import PlainDecoder
from shoal.prove.bench.tokens import open_loader
from shoal.train.data.loader import Batch
from shoal.train.program import compute_dtype, parameter_dtype

# Beyond any benchmark.
LAST_STEP = 10**6


@dataclass(frozen=True)
class PeerSetup:
    """One rank of one peer."""

    job: Job
    mesh: Mesh
    dataset: Path
    directory: Path  # this peer's own, shared by its ranks
    compiled: bool

    @property
    def model(self) -> Model:
        return self.job.model

    @property
    def recipe(self) -> Recipe:
        return self.job.config.recipe

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def world(self) -> int:
        return self.mesh.world

    @property
    def micro(self) -> int:
        return self.job.layout.micro_batch(self.recipe.batch)

    @property
    def accumulation(self) -> int:
        return self.job.layout.accumulation(self.recipe.batch)

    @property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.recipe)

    @property
    def states(self) -> torch.dtype:
        return parameter_dtype(self.recipe)

    @property
    def mixed(self) -> bool:
        """Whether weights are stored in another precision than they are computed with."""
        return self.compute != self.states

    def batches(self, journal: Journal) -> Iterator[list[Batch]]:
        """A step's micro-batches on the device, as ``shoal train`` would give this rank."""
        places = self.job.layout.positions(self.recipe.batch, self.mesh.data_index)
        with closing(open_loader(self.job, self.dataset).steps(1, LAST_STEP, lambda step: places)) as steps:
            for _, batches in journal.paced(steps):
                yield [batch.to(self.device) for batch in batches]

    def decoder(self, dtype: torch.dtype | None = None) -> PlainDecoder:
        """The plain decoder on this rank's device, with the initial weights that all peers share."""
        with torch.device("meta"):
            decoder = PlainDecoder(self.model)
        decoder = decoder.to(dtype or self.states).to_empty(device=self.device)
        if self.model.tied:  # ``to_empty`` has given each of the two its own parameter
            decoder.tie()
        initial.fill(
            ((decoder.canonical(name), initial.whole(name, one)) for name, one in decoder.named_parameters()),
            self.model,
            self.recipe.seed,
        )
        positions = torch.arange(self.recipe.seq, device=self.device)[None]
        decoder.rotation = tables(self.model, self.recipe.seq, positions, self.compute)
        return decoder

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """Fused, weight decay on matrices only, as in Shoal."""
        return torch.optim.AdamW(self.decayed(parameters), **self.adamw_settings, fused=True)

    def decayed(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Parameter groups with weight decay on matrices only."""
        chosen = list(parameters)
        return [
            {"params": [one for one in chosen if one.ndim >= 2], "weight_decay": self.recipe.weight_decay},
            {"params": [one for one in chosen if one.ndim < 2], "weight_decay": 0.0},
        ]

    @property
    def adamw_settings(self) -> dict[str, Any]:
        recipe = self.recipe
        return {"lr": recipe.peak_lr, "betas": (recipe.beta1, recipe.beta2), "eps": recipe.eps}

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, self.compute) if self.mixed else nullcontext()

    def compile_blocks(self, blocks: Iterable[nn.Module]) -> None:
        """Compile if there is a GPU, as Shoal does."""
        if self.compiled and self.device.type == "cuda":
            for block in blocks:
                block.compile(dynamic=False)

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """What a plain loop writes; logits in fp32, as in every stack here."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def mean_over_ranks(value: Tensor) -> Tensor:
    """What a training loop logs."""
    dist.all_reduce(value)
    return value / dist.get_world_size()
