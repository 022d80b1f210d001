"""Time causal attention with shared keys and values, forward and backward, in the network's memory layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from shoal.facts.measurements import Attended
from shoal.models.attention import attend
from shoal.prove.calibrate.parts import Made
from shoal.prove.calibrate.sampling import Pool, Sample

KIND = "attention"
KEY_HEADS_A_QUERY_HEAD = 4


def samples(
    pool: Pool, precision: str, heads: int, shapes: Sequence[tuple[int, int, int]]
) -> Iterator[Sample]:
    for head_dim, seq, sequences in shapes:
        key_heads = max(1, heads // KEY_HEADS_A_QUERY_HEAD)
        shape = (head_dim, heads, key_heads, seq, sequences)
        yield Sample((KIND, precision, "forward", *shape), partial(_forward, pool, *shape))
        yield Sample((KIND, precision, "backward", *shape), partial(_backward, pool, *shape))


def _made(pool: Pool, head_dim: int, heads: int, key_heads: int, seq: int, sequences: int) -> Made:
    """Rotation leaves queries and keys head by head; values are still token by token, as they were projected."""
    query = pool.take(sequences, heads, seq, head_dim).detach().requires_grad_()
    key = pool.take(sequences, key_heads, seq, head_dim).detach().requires_grad_()
    value = pool.take(sequences, seq, key_heads, head_dim).transpose(1, 2).detach().requires_grad_()
    positions = torch.arange(seq, device=pool.device).expand(sequences, seq)
    scale = head_dim**-0.5
    call = partial(attend, query, key, value, positions, None, scale=scale, window=None)
    return call, (query, key, value)


def _forward(pool: Pool, *shape: int) -> Callable[[], object]:
    return _made(pool, *shape)[0]


def _backward(
    pool: Pool, head_dim: int, heads: int, key_heads: int, seq: int, sequences: int
) -> Callable[[], object]:
    call, operands = _made(pool, head_dim, heads, key_heads, seq, sequences)
    # The projection's gradient comes token by token.
    grad = pool.take(sequences, seq, heads, head_dim).transpose(1, 2)
    return partial(torch.autograd.grad, call(), operands, grad, retain_graph=True)


def found(measured: Sequence[Sample], precision: str) -> tuple[Attended, ...]:
    ways: dict[tuple[object, ...], dict[str, float]] = {}
    for sample in measured:
        if sample.key[:2] == (KIND, precision):
            ways.setdefault(sample.key[3:], {})[str(sample.key[2])] = sample.seconds
    names = ("head_dim", "heads", "kv_heads", "seq", "sequences")
    return tuple(
        Attended.model_validate(dict(zip(names, shape, strict=True)) | both)
        for shape, both in sorted(ways.items(), key=lambda pair: str(pair[0]))
        if len(both) == 2
    )
