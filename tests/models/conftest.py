"""A small network with values, for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.facts.model import Model
from shoal.models.decoder import Network, build
from shoal.models.initial import initialise

SMALL: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 48,
    "vocab": 61,
    "max_positions": 64,
}


@pytest.fixture
def shape() -> Callable[..., Model]:
    """``shape(tied=True)``: a small model, changed as told."""
    return lambda **changes: Model(**{**SMALL, **changes})


@pytest.fixture
def network() -> Callable[..., Network]:
    """``network(model, dropout=0.1)``: built on the meta device, moved to the CPU and initialised."""

    def make(model: Model, **arguments: Any) -> Network:
        made = build(model, **arguments).to_empty(device="cpu")
        initialise(made, model, seed=1)
        return made

    return make


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions, int64 [3, 16]."""
    tokens = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(16).expand(3, 16)
