"""Validation loss and generated text; every rank takes part, because layers may be spread over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.facts.config import EvaluateSection
from shoal.facts.layout.sequence import length_unit
from shoal.models.generate import generate
from shoal.models.random import key
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.parallel.stage_module import MicroBatch
from shoal.train.data.loader import Loader, validation_rows
from shoal.train.data.samples import AnySamples
from shoal.train.data.tokenizers import Tokenizer
from shoal.train.step import micro_batch, summed_loss

PROMPT_TOKENS = 32


def evaluates_after(step: int, steps: int, evaluate: EvaluateSection) -> bool:
    """Whether an evaluation follows ``step``; it always follows the last one."""
    return step == steps or (evaluate.every > 0 and step % evaluate.every == 0)


class Patience:
    """Ends a run after this many evaluations in a row without a lower loss. 0: never."""

    def __init__(self, evaluations: int, losses: Iterable[float | None] = ()) -> None:
        """``losses``: of earlier evaluations, for a resumed run."""
        self.evaluations = evaluations
        self._lowest, self._waited = math.inf, 0
        for loss in losses:
            self.add(loss)

    def add(self, loss: float | None) -> None:
        if loss is not None and loss < self._lowest:
            self._lowest, self._waited = loss, 0
        else:
            self._waited += 1

    @property
    def over(self) -> bool:
        return 0 < self.evaluations <= self._waited


def heldout_loss(
    placed: Placed, samples: AnySamples, mesh: Mesh, most: int, micro: int, at_once: int
) -> float | None:
    """Mean loss over ``most`` samples, spread evenly; None if there are no targets."""
    found = heldout_means(placed, samples, mesh, most, micro, at_once)
    return None if found is None else found[0]


def heldout_means(
    placed: Placed,
    samples: AnySamples,
    mesh: Mesh,
    most: int,
    micro: int,
    at_once: int,
    tell: Callable[[int, int], None] | None = None,
) -> list[float] | None:
    """The loss per token or pair, then the loss's extra measures; None if there are no targets.

    Which rank sees which sample changes no sum. All ranks run equally many rows, because some strategies communicate in
    every forward pass; rows past the last sample are empty. ``at_once`` micro-batches of ``micro`` rows fill a
    pipeline.
    """
    losses, targets = own_heldout(
        placed, samples, mesh, most, micro, at_once, (mesh.data_index, mesh.layout.data_ranks), tell
    )
    sums = summed_loss(losses, placed, mesh)
    (seen,) = mesh.hosts.sum_integers([targets if mesh.first_of_replica else 0])
    return [one / seen for one in sums] if seen else None


def own_heldout(
    placed: Placed,
    samples: AnySamples,
    mesh: Mesh,
    most: int,
    micro: int,
    at_once: int,
    part: tuple[int, int],
    tell: Callable[[int, int], None] | None = None,
) -> tuple[list[Tensor], int]:
    """The losses of one part of the held-out rows, and their number of targets. ``part``: (index, count).

    Rows that belong together share a micro-batch. ``tell`` is called with the index and number of each forward pass.
    """
    index, ranks = part
    together = samples.together
    chosen = chosen_rows(samples, most)
    chosen += [len(samples)] * (-len(chosen) % (ranks * together))
    firsts = chosen[index * together :: ranks * together]
    mine = [first + place for first in firsts for place in range(together)]
    groups = [mine[start : start + micro] for start in range(0, len(mine), micro)]
    losses: list[Tensor] = []
    targets = 0
    for first in range(0, len(groups), at_once):
        if tell is not None:
            tell(first // at_once + 1, -(-len(groups) // at_once))
        rows = [validation_rows(samples, group).to(mesh.device) for group in groups[first : first + at_once]]
        losses += placed.executor.forward_only([micro_batch(row) for row in rows])
        targets += sum(row.count for row in rows)
    return losses, targets


def chosen_rows(samples: AnySamples, most: int) -> list[int]:
    """At most ``most`` samples, spread evenly; each together with the rows that belong to it."""
    together = samples.together
    every = len(samples) // together
    count = min(most // together, every)
    firsts = [number * every // count * together for number in range(count)]
    return [first + place for first in firsts for place in range(together)]


def sample_rows(
    placed: Placed,
    loader: Loader,
    tokenizer: Tokenizer,
    mesh: Mesh,
    evaluate: EvaluateSection,
    seed: int,
    step: int,
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: continuations of the first held-out texts, or answers to the first prompts."""
    count = min(evaluate.samples, loader.heldout_count)
    prompts = [loader.heldout_prompt(number, PROMPT_TOKENS) for number in range(count)]
    written = write_samples(
        placed, tokenizer, mesh, prompts, evaluate.sample_tokens, evaluate.temperature, seed, step
    )
    return [{"step": step, "prompt": prompt, "text": text} for prompt, text in written]


def write_samples(
    placed: Placed,
    tokenizer: Tokenizer,
    mesh: Mesh,
    prompts: list[Tensor],
    count: int,
    temperature: float,
    seed: int,
    step: int,
) -> list[tuple[str, str]]:
    """(prompt, continuation) for each prompt; random draws are a hash of (seed, step, sample)."""
    texts = []
    shape = placed.segments[0].network.shape

    def score(tokens: Tensor) -> Tensor:
        return placed.executor.scores(padded(tokens, mesh), tokens.shape[1] - 1)

    def padded(tokens: Tensor, mesh: Mesh) -> MicroBatch:
        """Ranks that share a row need a length that divides; padding after the last token is never attended to."""
        length = tokens.shape[1] + -tokens.shape[1] % length_unit(mesh.layout)
        positions = torch.arange(length, device=tokens.device)
        if shape.positions == "learned":
            positions = positions.clamp(max=shape.max_positions - 1)
        tokens = F.pad(tokens, (0, length - tokens.shape[1]))
        return MicroBatch(tokens, positions.expand_as(tokens), None, None, None)

    for number, prompt in enumerate(prompts):
        written = generate(
            score,
            prompt.to(mesh.device)[None],
            count,
            temperature,
            key(seed, step, f"sample {number}"),
            tokenizer.end,
            shape.max_positions,
        )[0]
        texts.append((tokenizer.decode(prompt.tolist()), tokenizer.decode(written[len(prompt) :].tolist())))
    return texts
