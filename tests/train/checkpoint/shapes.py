"""Narrow models of every family. Imported by ranks, so it imports nothing that takes long."""

from __future__ import annotations

from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS

NARROW = {"layers": 2, "hidden": 32, "heads": 4, "head_dim": 8, "ffn": 48, "vocab": 61, "max_positions": 64}


def small(preset: str) -> Model:
    model = PRESETS[preset]
    kv_heads = 4 if preset in ("gpt2", "pythia-6.9b") else 2
    experts = model.experts and model.experts.model_copy(update={"ffn": NARROW["ffn"]})
    return model.model_copy(
        update={**NARROW, "kv_heads": kv_heads, "name": preset, "window_layers": None, "experts": experts}
    )
