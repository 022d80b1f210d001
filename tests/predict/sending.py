"""One training step of real ranks on a tiny model, every collective counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch

from shoal.facts import logits
from shoal.facts.cluster.notation import find
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.facts.traffic import Traffic
from shoal.models.initial import fill
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel.mesh import Mesh
from shoal.predict.workload import Workload
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint

SEQ, ROWS = 8, 8
# Five layers, so that stages differ; 61 rows of vocabulary, so that tensor ranks do.
SHAPE: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": 5,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "ffn": 24,
    "vocab": 61,
    "max_positions": 16,
    "init_std": 0.1,
}
TIED = {"tied": True}
SHARED_HEADS = {"kv_heads": 1}
QWEN2 = {"family": "qwen2", "qkv_bias": True}
QWEN3 = {"family": "qwen3", "qk_norm": True}
GEMMA: dict[str, Any] = {
    "norm_offset": True,
    "output_norms": True,
    "scaled_embedding": True,
    "activation": "gelu_tanh",
    "tied": True,
    "window": 5,
    "window_layers": (0, 2),
}
GEMMA2: dict[str, Any] = {
    **GEMMA,
    "family": "gemma2",
    "query_width": 6.0,
    "attention_cap": 1.5,
    "logit_cap": 2.0,
}
GEMMA3: dict[str, Any] = {**GEMMA, "family": "gemma3_text", "qk_norm": True, "window_theta": 2e3}
NEOX: dict[str, Any] = {
    "family": "gpt_neox",
    "norm": "layer",
    "activation": "gelu",
    "gated": False,
    "parallel_residual": True,
    "kv_heads": 4,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rope_fraction": 0.5,
}
GPT2: dict[str, Any] = {
    "family": "gpt2",
    "norm": "layer",
    "activation": "gelu_tanh",
    "gated": False,
    "positions": "learned",
    "kv_heads": 4,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
}


@dataclass(frozen=True)
class Case:
    """A layout with what else of a run it takes."""

    layout: str
    model: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, Any] = field(default_factory=dict)
    logits_at_once: int = logits.LOGITS_AT_ONCE
    compiled: bool = False
    cluster: str = ""  # empty: one node

    def __str__(self) -> str:
        changed = {**self.model, **self.recipe, **self.tune}
        return f"{self.layout} {' '.join(f'{name}={value}' for name, value in changed.items())}".strip()

    @cached_property
    def workload(self) -> Workload:
        layout = Layout.parse(self.layout)
        recipe = Recipe.model_validate({"seq": SEQ, "batch": ROWS, **self.recipe})
        # Buckets of about a layer, so that there are several.
        tune = TuneSection.model_validate({"bucket_mb": 0.008, **self.tune})
        model = Model.model_validate({**SHAPE, **self.model})
        cluster = find(self.cluster or f"{layout.world}xcpu")
        return Workload(model, cluster, recipe, layout, tune=tune, compile=self.compiled)


def count(rank: int, world: int, cases: list[Case]) -> list[list[Traffic]]:
    """What this rank sends in the second step of each case."""
    return [_counted(rank, case) for case in cases]


def _counted(rank: int, case: Case) -> list[Traffic]:
    workload = case.workload
    model, recipe, layout = workload.model, workload.recipe, workload.layout
    mesh = Mesh(layout, rank, torch.device("cpu"), domain=workload.cluster.apart)
    with patch.object(logits, "LOGITS_AT_ONCE", case.logits_at_once):
        # Kernels play no part in what is sent; the graphs that send it are those of torch's own compiler.
        step = assemble(
            blueprint(model, recipe),
            recipe,
            workload.tune,
            mesh,
            partial(fill, model=model, seed=0),
            compile_with="aot_eager" if case.compiled else None,
        )
        share = ROWS // layout.data_ranks
        start = mesh.data_index * share
        batches = [
            _rows(model, first, workload.micro) for first in range(start, start + share, workload.micro)
        ]
        step(1, batches, ROWS * SEQ)
        with CollectiveCounter(mesh.names) as counter:
            step.agree(ROWS * SEQ)  # as the loop does
            step(2, batches, ROWS * SEQ)
    return sorted(counter.traffic())


def _rows(model: Model, first: int, number: int) -> Batch:
    tokens = (torch.arange(SEQ) * 7 + torch.arange(first, first + number)[:, None] * 13) % model.vocab
    positions = torch.arange(SEQ).expand(number, SEQ).contiguous()
    return Batch(
        tokens, tokens.roll(-1, 1), positions, None, torch.arange(first, first + number), number * SEQ
    )
