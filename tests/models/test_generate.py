from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.facts.model import Model
from shoal.models.decoder import Network
from shoal.models.generate import Score, generate, gumbel
from shoal.models.random import bits, key

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


def scores_of(network: Network) -> Score:
    def score(tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return network.lm_head.logits(network(tokens, positions)[:, -1])

    return score


def test_greedy_takes_the_likeliest(shape: Callable[..., Model], network: Callable[..., Network]) -> None:
    made = network(shape())
    grown = generate(scores_of(made), PROMPT, 4, temperature=0, key=1)
    assert grown.shape == (2, 7) and torch.equal(grown[:, :3], PROMPT)
    logits = made.lm_head.logits(made(grown, torch.arange(7).expand(2, 7)))
    assert torch.equal(logits[:, 2:-1].argmax(-1), grown[:, 3:])


def test_the_key_decides_and_long_contexts_are_cropped(
    shape: Callable[..., Model], network: Callable[..., Network]
) -> None:
    score = scores_of(network(shape(positions="learned", max_positions=4)))

    def grow(seed: int) -> torch.Tensor:
        return generate(score, PROMPT, 8, temperature=1.0, key=key(seed, 0, "sample"), longest=4)

    first = grow(1)
    assert first.shape == (2, 11)
    assert torch.equal(first, grow(1))
    assert not torch.equal(first, grow(2))
    # The rows do not share their draws.
    twins = generate(score, PROMPT[:1].expand(2, 3), 8, temperature=1.0, key=5, longest=4)
    assert not torch.equal(twins[0], twins[1])


def test_a_row_that_ended_stays_ended(shape: Callable[..., Model], network: Callable[..., Network]) -> None:
    score = scores_of(network(shape()))
    free = generate(score, PROMPT, 6, temperature=0, key=0)
    end = int(free[0, 4])
    grown = generate(score, PROMPT, 6, temperature=0, key=0, end=end)
    for row, free_row in zip(grown[:, 3:].tolist(), free[:, 3:].tolist(), strict=True):
        stop = free_row.index(end) + 1 if end in free_row else len(free_row)
        assert row == (free_row[:stop] + [end] * 6)[: len(row)]
    alone = generate(score, PROMPT[:1], 6, temperature=0, key=0, end=end)
    assert int(alone[0, -1]) == end and alone.shape[1] < 9


def test_gumbel_noise_samples_the_softmax() -> None:
    keys = bits(3, torch.arange(50_000))
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    chosen = (logits + gumbel(keys, 7, 4)).argmax(-1)
    shares = torch.bincount(chosen, minlength=4).double() / len(keys)
    assert torch.allclose(shares, logits.softmax(-1), atol=0.01)
