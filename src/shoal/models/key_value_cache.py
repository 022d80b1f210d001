"""A key/value cache: attention remembers the keys and values of a row, so that each new token is computed alone.

It replaces ``attend`` in every block from outside, like context parallelism. The decoder does not change: it takes new
tokens with their positions in the row, which determine their rotary angles.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.attention import Attend
from shoal.models.attention_blocks import plain_forward
from shoal.models.decoder import Block
from shoal.models.documents import Documents


class KeyValueCache:
    """The cached keys and values of all blocks for the current rows."""

    def __init__(self, blocks: Iterable[nn.Module], length: int) -> None:
        """Attach to these blocks: from now on they attend to cached tokens. ``length``: the most tokens in a row."""
        self.length = length
        self.start = 0  # cached tokens per row; new tokens follow them
        for block in blocks:
            assert isinstance(block, Block)
            block.self_attn.attend = _CachedAttend(self, block.self_attn.attend)


class _CachedAttend:
    """One block's attention with its cache. Tokens from ``start`` on are overwritten, including padding."""

    def __init__(self, cache: KeyValueCache, attend: Attend) -> None:
        self.cache, self.attend = cache, attend
        self.key = self.value = torch.empty(0)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        documents: Documents | None,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
    ) -> Tensor:
        assert documents is None
        start, count = self.cache.start, key.shape[2]
        if start == 0:
            shape = (*key.shape[:2], max(self.cache.length, count))
            self.key, self.value = (one.new_empty((*shape, one.shape[-1])) for one in (key, value))
        self._remember(key, value, start)
        if start == 0:
            return self.attend(query, key, value, positions, documents, scale=scale, window=window, cap=cap)
        seen = start + count
        keys, values = self.key[:, :, :seen], self.value[:, :, :seen]
        if cap is not None:
            return _capped(query, keys, values, visible(start, count, window, query.device), scale, cap)
        return F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=visible(start, count, window, query.device),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _remember(self, key: Tensor, value: Tensor, start: int) -> None:
        stop = start + key.shape[2]
        if stop > self.key.shape[2]:  # padding exceeds the length by a few tokens
            self.key, self.value = (
                F.pad(one, (0, 0, 0, stop - one.shape[2])) for one in (self.key, self.value)
            )
        self.key[:, :, start:stop], self.value[:, :, start:stop] = key, value


def _capped(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Attention with capped scores for a few new tokens, so that the scores are small."""
    shared = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(shared, dim=1) for one in (key, value))
    mask = None if seen is None else query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    return plain_forward(query, key, value, mask, False, scale, cap)[0]


def visible(start: int, count: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which tokens each of ``count`` new ones after ``start`` sees, [count, start + count]; None: all."""
    if count == 1 and (window is None or window > start):
        return None
    query = torch.arange(start, start + count, device=device)[:, None]
    key = torch.arange(start + count, device=device)[None]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)
