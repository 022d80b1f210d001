"""Questions about a small model on CPUs, for tests that hold a prediction against what was counted."""

from __future__ import annotations

from typing import Any

from shoal.facts.cluster.notation import find
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.layout.ranks import coordinates
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.predict.workload import Workload

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
) -> Workload:
    """A small model on CPUs."""
    parsed = Layout.parse(layout)
    return Workload(
        Model(**{**SHAPE, **(changes or {})}),
        find(f"{parsed.world}xcpu"),
        Recipe(**{"seq": 512, "batch": 4, "steps": 1, **recipe}),
        parsed,
        tune=TuneSection(**(tune or {})),
    )


def stage_of(workload: Workload, rank: int) -> int:
    return coordinates(rank, workload.layout)["pp"]
