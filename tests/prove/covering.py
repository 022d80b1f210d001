"""Dry runs that cover, pair by pair, what decides a rank's memory: family, window, precisions, degrees, passes.

Widths are those of the families' own models, for without data they cost nothing; only layers and passes are few.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.workload import Workload

FAMILIES = {
    "llama": "llama3-8b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2-7b",
    "qwen3": "qwen3-8b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-1b",
    "gpt2": "gpt2",
    "gpt_neox": "pythia-6.9b",
}
WINDOW = 128


class Twin(NamedTuple):
    """One dry run."""

    family: str
    precisions: str  # of the computation, of states, of sums; one word: all three
    layout: str
    window: str  # which layers have one: "none", "some", "all"
    seq: int
    passes: int  # micro-batches of a data rank
    layers: int = 0  # 0: as few as the layout needs

    def __str__(self) -> str:
        return f"{self.family}-{self.precisions}-{self.layout}-{self.window}-{self.seq}-{self.passes}"

    def workload(self) -> Workload:
        layout = Layout.parse(self.layout)
        computed, states, summed = (self.precisions.split() * 3)[:3]
        layers = self.layers or 1 + layout.pp
        changes = {
            "layers": layers,
            "window": None if self.window == "none" else WINDOW,
            "window_layers": (1,) if self.window == "some" else None,
        }
        return Workload(
            PRESETS[FAMILIES[self.family]].model_copy(update=changes),
            find(f"{layout.world}xH100"),
            Recipe(
                seq=self.seq,
                batch=layout.data_ranks * (layout.micro or 1) * self.passes,
                steps=1,
                precision=computed,
                states=states,
                reduce=summed,
            ),
            layout,
        )

    def factors(self) -> dict[str, object]:
        layout = Layout.parse(self.layout)
        return {
            "family": self.family,
            "precisions": self.precisions,
            "window": self.window,
            "dp": layout.dp,
            "sharded": layout.fsdp > 1 and layout.zero,
            "tp": layout.tp,
            "pp": layout.pp,
            "recompute": layout.recompute,
            "rows": layout.micro,
            "passes": self.passes - (layout.pp > 1),  # a pipeline of two begins with two
            "seq": self.seq,
        }


# A test holds that every pair of two factors' values is here, but for Mistral without its window.
PAIRS = (
    Twin("gpt2", "bf16 fp32 fp32", "dp=4,fsdp=2,zero=1,pp=2,micro=2,recompute=full", "all", 256, 3),
    Twin("llama", "bf16 fp32 fp32", "fsdp=2,tp=2,micro=1", "some", 1024, 1),
    Twin("qwen2", "bf16 fp32 bf16", "dp=2,micro=2,recompute=selective", "none", 1024, 3),
    Twin("gpt_neox", "bf16 bf16 bf16", "fsdp=2,zero=2,tp=2,pp=2,micro=1,recompute=full", "none", 256, 4),
    Twin("qwen3", "bf16 bf16 fp32", "dp=2,tp=2,pp=2,micro=1,recompute=selective", "all", 256, 2),
    Twin("mistral", "fp32", "dp=4,fsdp=2,zero=2,micro=1", "some", 256, 2),
    Twin("qwen2", "fp32", "fsdp=2,tp=2,pp=2,micro=2,recompute=full", "all", 1024, 3),
    Twin("gpt_neox", "bf16 bf16 fp32", "dp=4,fsdp=2,zero=1,micro=2", "none", 1024, 1),
    Twin("qwen3", "bf16 bf16 bf16", "dp=4,fsdp=2,micro=2,recompute=selective", "some", 1024, 3),
    Twin("llama", "bf16 fp32 bf16", "dp=2,fsdp=2,zero=1,tp=2,pp=2,micro=1,recompute=full", "some", 256, 3),
    Twin("gpt2", "bf16 fp32 bf16", "dp=2,fsdp=2,zero=2,tp=2,micro=1", "all", 1024, 1),
    Twin("mistral", "bf16 bf16 bf16", "fsdp=2,zero=1,pp=2,micro=2", "all", 1024, 4),
    Twin("qwen2", "bf16 bf16 bf16", "dp=4,tp=2,micro=1,recompute=full", "some", 256, 1),
    Twin("llama", "fp32", "micro=2,recompute=selective", "none", 1024, 2),
    Twin("mistral", "bf16 bf16 fp32", "dp=2,fsdp=2,tp=2,micro=2,recompute=full", "some", 256, 1),
    Twin("gpt2", "bf16 bf16 fp32", "fsdp=2,zero=2,tp=2,pp=2,micro=2,recompute=selective", "none", 1024, 4),
    Twin("gpt_neox", "bf16 fp32 fp32", "dp=2,tp=2,pp=2,micro=1,recompute=selective", "all", 256, 3),
    Twin("qwen3", "bf16 fp32 bf16", "fsdp=2,tp=2,pp=2,micro=2,recompute=full", "none", 256, 3),
    Twin("gpt2", "bf16 bf16 bf16", "dp=2,micro=2", "some", 1024, 2),
    Twin("qwen3", "fp32", "dp=2,fsdp=2,zero=1,tp=2,pp=2,micro=2,recompute=selective", "all", 1024, 4),
    Twin("qwen2", "bf16 fp32 fp32", "fsdp=2,zero=2,micro=1", "none", 1024, 3),
    Twin(
        "llama", "bf16 bf16 bf16", "dp=4,fsdp=2,zero=2,tp=2,pp=2,micro=2,recompute=selective", "all", 1024, 4
    ),
    Twin("gpt_neox", "fp32", "dp=4,fsdp=2,tp=2,pp=2,micro=2,recompute=selective", "some", 1024, 2),
    Twin("mistral", "bf16 fp32 bf16", "dp=4,tp=2,micro=2,recompute=selective", "all", 1024, 1),
    Twin("qwen3", "bf16 fp32 fp32", "fsdp=2,zero=2,tp=2,micro=1", "none", 1024, 2),
    Twin("qwen2", "bf16 bf16 fp32", "fsdp=2,zero=1,pp=2,micro=1", "all", 256, 3),
    Twin("gpt2", "fp32", "dp=2,fsdp=2,tp=2,micro=2,recompute=selective", "all", 256, 1),
    Twin("mistral", "bf16 fp32 fp32", "fsdp=2,tp=2,pp=2,micro=2", "some", 256, 2),
    Twin("llama", "bf16 bf16 fp32", "dp=2,tp=2,pp=2,micro=2,recompute=full", "none", 256, 4),
    Twin(
        "gpt_neox",
        "bf16 fp32 bf16",
        "dp=2,fsdp=2,zero=1,tp=2,pp=2,micro=1,recompute=selective",
        "none",
        256,
        4,
    ),
)

# What a set of pairs does not reach: several units and passes of replicas of shards; wide tensor groups; long masks.
OTHERS = (
    Twin("llama", "bf16 bf16 fp32", "dp=2,fsdp=2,micro=1,recompute=full", "none", 2048, 1, 4),
    Twin("llama", "bf16 bf16 fp32", "dp=4,fsdp=2,micro=1,recompute=full", "none", 256, 3, 4),
    Twin("llama", "bf16 fp32 bf16", "dp=2,fsdp=2,unit=3,micro=1", "none", 256, 2, 4),
    Twin("llama", "bf16 fp32 fp32", "dp=2,fsdp=8,tp=8,micro=4,recompute=full", "none", 4096, 1),
    Twin("mistral", "bf16 fp32 fp32", "fsdp=2,tp=4,micro=1,recompute=full", "all", 8192, 1),
    # Norms behind attention and MLP, with an offset; capped scores and logits; two rotary bases.
    Twin("gemma2", "bf16 fp32 fp32", "fsdp=2,tp=2,micro=1,recompute=full", "some", 256, 1),
    Twin("gemma2", "bf16 fp32 bf16", "tp=2,sp=0,pp=2,micro=1,recompute=selective", "none", 256, 2),
    Twin("gemma3", "bf16 fp32 fp32", "fsdp=2,pp=2,micro=2", "some", 256, 2),
    Twin("gemma3", "fp32", "tp=2,micro=2", "some", 256, 1),
)
