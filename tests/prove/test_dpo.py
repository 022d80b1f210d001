"""DPO in layouts: losses, gradients, weights and the reference are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.facts.layout import Layout
from shoal.prove.parity import Prover

# Every axis, zero 1 to 3, both kinds of context, accumulation, recompute, a schedule that splits backward passes.
LAYOUTS = (
    "dp=2,micro=2",
    "fsdp=2,zero=1",
    "fsdp=2,zero=2,micro=2",
    "dp=2,fsdp=2,recompute=full",
    "tp=2,sp=0",
    "tp=2,cp=2",
    "cp=2,cp_kind=ulysses,micro=2,recompute=selective",
    "fsdp=2,pp=2,micro=2",
    "pp=2,schedule=zbv",
)
STRICT = ("fsdp=2", "pp=2,schedule=zb")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = ("reef", "a tide", "no", "sun")
    rows = [
        {"prompt": f"{number}?", "chosen": words[number % 4], "rejected": words[(number + 1) % 4] + "!"}
        for number in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(pairs: Path) -> dict[str, object]:
    return {
        "data__source": pairs,
        "data__format": "preference",
        "data__template": "none",
        "recipe__loss": "dpo",
        "recipe__beta": 0.5,
    }


def test_layouts_prefer_what_one_process_prefers(make_prover: Callable[..., Prover], pairs: Path) -> None:
    prover = make_prover("fp64", **options(pairs))
    found = prover.prove([Layout.parse(text) for text in LAYOUTS])
    assert found.reference[0] == pytest.approx(0.6931471805599453, abs=0.1)  # but for dropout, a coin's
    assert abs(found.reference[1] - found.reference[0]) > 1e-4  # the second step is another one
    for verdict in found.verdicts:
        assert verdict.ok, (str(verdict.layout), verdict.reason)
        assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12, str(verdict.layout)


def test_strict_runs_are_equal_to_the_bit(make_prover: Callable[..., Prover], pairs: Path) -> None:
    prover = make_prover("fp32", **options(pairs), run__strict="true")
    for verdict in prover.prove([Layout.parse(text) for text in STRICT]).verdicts:
        assert verdict.bit_identical, (str(verdict.layout), verdict.reason)
