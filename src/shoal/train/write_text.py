"""Generate text with trained weights: the prompt goes through the placed network once, then one token at a time.

Works in any layout: the network is placed as for training, and its blocks get a key/value cache. Where context ranks
share each row, a rank's cache does not cover the whole row, so there all tokens are recomputed each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.facts.layout.sequence import length_unit
from shoal.models.generate import TokenCandidates, generate
from shoal.models.key_value_cache import KeyValueCache
from shoal.models.random import key
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.parallel.stage_module import MicroBatch
from shoal.plan.resolve import Job
from shoal.train.first_weights import weights_of
from shoal.train.program import blueprint


@dataclass(frozen=True)
class TextRequest:
    """A request for text. ``prompt`` is in tokens, at least one."""

    origin: str  # a run, a checkpoint or a model directory
    prompt: tuple[int, ...]
    count: int  # the most tokens to write
    ends: tuple[int, ...]  # tokens that end a text
    temperature: float
    candidates: TokenCandidates
    seed: int
    average: bool = False  # use the averaged weights that recipe.ema keeps


def write_text(
    job: Job, mesh: Mesh, request: TextRequest, told: Callable[[list[int]], None] = lambda written: None
) -> list[int]:
    """The tokens after the prompt, without the one that ends the text. ``told`` is called with all of them so far."""
    network = blueprint(job.model, job.config.recipe)
    placed = apply(
        network,
        mesh,
        job.config.tune,
        weights_of(request.origin, job.model, request.average),
        job.config.recipe.seq,
    )
    begin = len(request.prompt)
    score = RowScores(placed, mesh, begin + request.count)

    def so_far(tokens: Tensor) -> None:
        written: list[int] = tokens[0, begin:].tolist()
        if written[-1] in request.ends:
            raise _Ended(written[:-1])
        told(written)

    try:
        tokens = generate(
            score,
            torch.tensor([request.prompt], device=mesh.device),
            request.count,
            request.temperature,
            key(request.seed, 0, "generate"),
            candidates=request.candidates,
            told=so_far,
        )
    except _Ended as ended:
        return ended.written
    found: list[int] = tokens[0, begin:].tolist()
    return found


class _Ended(Exception):
    """One of the tokens that end a text was drawn."""

    def __init__(self, written: list[int]) -> None:
        super().__init__()
        self.written = written


class RowScores:
    """The logits that follow a growing row, computed from its new tokens."""

    def __init__(self, placed: Placed, mesh: Mesh, length: int) -> None:
        self.placed, self.mesh = placed, mesh
        self.shape = placed.segments[0].network.shape
        blocks = [block for segment in placed.segments for block in segment.network.model.layers.values()]
        unit = length_unit(mesh.layout)
        self.cache = KeyValueCache(blocks, length + unit) if mesh.layout.cp == 1 else None

    def __call__(self, tokens: Tensor) -> Tensor:
        start = self.cache.start if self.cache is not None else 0
        new = tokens[:, start:]
        count = new.shape[1]
        # Ranks that share a row need a length that divides; padding after the last token is never attended to.
        padded = count + -count % length_unit(self.mesh.layout)
        positions = torch.arange(start, start + padded, device=tokens.device)
        if self.shape.positions == "learned":
            positions = positions.clamp(max=self.shape.max_positions - 1)
        new = F.pad(new, (0, padded - count))
        batch = MicroBatch(new, positions.expand_as(new), None, None, None)
        scores = self.placed.executor.scores(batch, count - 1)
        if self.cache is not None:
            self.cache.start = tokens.shape[1]
        return scores
