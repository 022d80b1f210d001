"""Compiled blocks beside eager ones on one device: a step's time, compilation, what a block keeps, peak and prediction.

On a GPU:      python benchmarks/compiled.py
On a CPU:      python benchmarks/compiled.py --small --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from record import record

from shoal.facts.cluster.notation import find
from shoal.facts.config import TuneSection
from shoal.facts.layout import RECOMPUTES, Layout
from shoal.facts.layout.kept import kept_tensors
from shoal.facts.model import Model
from shoal.facts.precision import COMPUTE_BYTES
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.compile import cache_counts
from shoal.parallel.mesh import Mesh
from shoal.predict.memory import ledger
from shoal.predict.workload import Workload
from shoal.train.data.loader import Batch
from shoal.train.program import BACKEND, assemble, blueprint

WARM_UP, STEPS = 3, 7
LLAMA: dict[str, Any] = {
    "name": "1.2B",
    "family": "llama",
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 8192,
    "vocab": 128256,
    "max_positions": 4096,
    "tied": True,
}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "gpt2": {
        "family": "gpt2",
        "norm": "layer",
        "gated": False,
        "activation": "gelu_tanh",
        "positions": "learned",
    }
    | {"kv_heads": 32, **BIASES},
    "neox": {"family": "gpt_neox", "norm": "layer", "gated": False, "activation": "gelu", "kv_heads": 32}
    | {"parallel_residual": True, "rope_fraction": 0.25, **BIASES},
}
SMALL = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256, "vocab": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cluster", default="local")
    parser.add_argument("--small", action="store_true", help="a shape that a CPU can compute")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--families", nargs="*", default=list(SHAPES))
    parser.add_argument("--kinds", nargs="*", default=list(RECOMPUTES))
    options = parser.parse_args()
    for family in options.families:
        for kind in options.kinds:
            for compiled in (False, True):
                measure(family, kind, compiled, options)


def measure(family: str, kind: str, compiled: bool, options: argparse.Namespace) -> None:
    shape = {**LLAMA, **SHAPES[family], **(SMALL if options.small else {})}
    if options.small and not SHAPES[family].get("gated", True):
        shape["kv_heads"] = shape["heads"]
    model = Model.model_validate(shape)
    seq = 128 if options.small else 4096
    recipe = Recipe.model_validate({"seq": seq, "batch": options.micro, "precision": "bf16"})
    cluster = find("1xcpu" if options.device == "cpu" else options.cluster)
    layout = Layout.parse(f"recompute={kind}")
    workload = Workload(model, cluster, recipe, layout, compile=compiled)
    device = torch.device(options.device)
    torch.compiler.reset()
    step = assemble(
        blueprint(model, recipe),
        recipe,
        TuneSection(),
        Mesh(layout, 0, device),
        partial(fill, model=model, seed=0),
        compile_with=BACKEND if compiled else None,
    )
    batch = rows(model, options.micro, seq).to(device)
    times = []
    for number in range(1, WARM_UP + STEPS + 1):
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step(number, [batch], batch.count)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    blocks = step.placed.compiled
    predicted = ledger(workload).peak_allocated
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    record(
        "compiled",
        family=family,
        recompute=kind,
        compiled=compiled,
        micro=options.micro,
        step_s=statistics.median(times[WARM_UP:]),
        first_step_s=times[0],
        compile_s=blocks.seconds if blocks else None,
        problem=blocks.problem if blocks else None,
        cache=cache_counts()._asdict(),
        kept_a_token=sum(one.bytes for one in kept_tensors(model, layout.recompute, COMPUTE_BYTES["bf16"])),
        peak=peak,
        predicted_peak=predicted,
        peak_error=None if peak is None else predicted / peak - 1,
    )
    del step, batch
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rows(model: Model, count: int, seq: int) -> Batch:
    tokens = (torch.arange(seq) * 7 + torch.arange(count)[:, None] * 13) % model.vocab
    positions = torch.arange(seq).repeat(count, 1)
    return Batch(tokens, tokens.roll(-1, 1), positions, None, torch.arange(count), count * seq)


if __name__ == "__main__":
    main()
