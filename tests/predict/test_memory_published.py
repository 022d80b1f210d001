"""Reserved memory of torchtitan runs that its authors published, and where the line between fitting and not is.

Four of the twelve are off by more than 5 %: three of spring 2024, before the version that ``TITAN`` describes, hold
some 5 GiB more than the tensors that are known; one of autumn 2025 compiles its loss too.
"""

from __future__ import annotations

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.cluster.stack import TITAN, TITAN_COMPILED, Stack
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.memory import ledger
from shoal.predict.workload import Workload

LLAMA3, QWEN3, LLAMA2 = PRESETS["llama3-8b"], PRESETS["qwen3-32b"], PRESETS["llama2-7b"]
# Source, model, sequence length, global batch, layout, stack, GiB reserved.
Row = tuple[str, Model, int, int, str, Stack, float]
RUNS: list[Row] = [
    ("Dec 2024, T1", LLAMA3, 8192, 16, "fsdp=8,recompute=selective", TITAN_COMPILED, 77.0),
    ("Dec 2024, T3", LLAMA3, 8192, 256, "fsdp=128,recompute=selective", TITAN_COMPILED, 62.0),
    ("#822", LLAMA3, 8192, 8, "fsdp=8,recompute=selective", TITAN, 49.59),
    ("#822, again", LLAMA3, 8192, 8, "fsdp=8,recompute=selective", TITAN, 49.41),
    ("#822, not resharded", LLAMA3, 8192, 8, "fsdp=8,zero=2,recompute=selective", TITAN, 62.18),
    ("#1690, compiled loss", QWEN3, 4096, 16, "fsdp=8,recompute=full", TITAN_COMPILED, 81.85),
    ("#1690, 16 a rank", QWEN3, 4096, 64, "fsdp=4,tp=8,recompute=full", TITAN, 43.45),
    ("#1690, 32 a rank", QWEN3, 4096, 128, "fsdp=4,tp=8,recompute=full", TITAN, 70.79),
    ("#1690, 64 GPUs", QWEN3, 4096, 256, "fsdp=8,tp=8,recompute=full", TITAN, 63.27),
    ("#165, selective", LLAMA2, 2048, 64, "fsdp=8,recompute=selective", TITAN, 63.9),
    ("#165, full", LLAMA2, 2048, 64, "fsdp=8,recompute=full", TITAN, 31.02),
    ("#165, selective again", LLAMA2, 2048, 64, "fsdp=8,recompute=selective", TITAN, 59.41),
]
UNEXPLAINED = ("#165", "#1690, compiled")


def error(row: Row) -> float:
    name, model, seq, batch, layout, stack, measured = row
    parsed = Layout.parse(layout)
    recipe = Recipe(seq=seq, batch=batch, steps=1, precision="bf16")
    said = ledger(Workload(model, find(f"{parsed.world}xH100-96GB"), recipe, parsed, stack))
    assert said.fits, name
    print(f"{name:24} predicted {said.reserved / 2**30:6.2f} measured {measured:6.2f}")
    return said.reserved / 2**30 / measured - 1


def test_reserved_memory_of_torchtitan() -> None:
    errors = {row[0]: error(row) for row in RUNS}
    explained = [abs(size) for name, size in errors.items() if not name.startswith(UNEXPLAINED)]
    assert len(explained) == 8 and max(explained) < 0.05, errors
    assert max(map(abs, errors.values())) < 0.16, errors


@pytest.mark.parametrize(
    ("model", "cluster", "layout", "fits"),
    [
        ("llama3-8b", "8xH100", "fsdp=8,micro=1", True),
        ("llama3-70b", "8xH100", "fsdp=8,micro=1,recompute=full", False),
        ("llama3-70b", "64xH100", "fsdp=64,micro=1,recompute=full", True),
        ("llama3-8b", "8xA100-40GB", "dp=8,micro=1,recompute=full", False),
        ("gpt3-175b", "8xH100", "tp=8,micro=1,recompute=full", False),
    ],
)
def test_what_plainly_fits_and_what_plainly_does_not(
    model: str, cluster: str, layout: str, fits: bool
) -> None:
    shape = PRESETS[model]
    recipe = Recipe(seq=min(4096, shape.max_positions), batch=64, steps=1, precision="bf16")
    assert ledger(Workload(shape, find(cluster), recipe, Layout.parse(layout))).fits is fits
