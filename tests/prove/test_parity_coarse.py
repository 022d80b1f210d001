"""Parity in bf16 and fp8: within their own rounding, and still wrong where a strategy is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.prove.test_mutations import all_reduce_missing, norm_not_summed_over_tp
from tests.thinned import rest

from shoal.cli.main import main
from shoal.facts.layout import Layout
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.parallel.float8_scales import Float8Scales
from shoal.prove import coverage
from shoal.prove.parity import SAME_SCALES, Prover
from shoal.prove.parity_rank import ParityRank, run_parity_rank
from shoal.train import program

# Of the twelve that ``shoal parity --precision bf16 --set compile.enabled=true`` compares, one every time.
ALWAYS = ("fsdp=2,zero=1",)
SHIPPED = rest((one for one in coverage.QUICK if "ep=" not in one), ALWAYS.__contains__, keep=3)


@pytest.fixture(scope="session")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose widths fp8 takes, on one tensor rank and on two."""
    update = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 265}
    path = tmp_path_factory.mktemp("tiles") / "config.json"
    path.write_text(json.dumps(write_config(PRESETS["tiny"].model_copy(update=update))))
    return path


@pytest.mark.parametrize("layout", ["recompute=full", "fsdp=2", "fsdp=2,zero=1,micro=2", "pp=2,schedule=zb"])
def test_the_same_micro_batches_differ_as_bf16_does(
    make_prover: Callable[..., Prover], tiles: Path, layout: str
) -> None:
    (verdict,) = make_prover("fp8", model__path=tiles).prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, verdict.reason
    assert verdict.max_grad_diff <= SAME_SCALES.gradient


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("layout", ["micro=2", "tp=2"])
def test_other_scales_differ_by_what_fp8_rounds(
    make_prover: Callable[..., Prover], tiles: Path, layout: str, scaling: str
) -> None:
    prover = make_prover("fp8", model__path=tiles, recipe__fp8=scaling)
    (verdict,) = prover.prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, verdict.reason
    assert verdict.max_grad_diff > 2 * SAME_SCALES.gradient


def scales_of_own_rows() -> None:
    made = Float8Scales.__init__

    def alone(self: Float8Scales, blocks: Any, scaling: Any, mesh: Any, sharded: bool) -> None:
        made(self, blocks, scaling, mesh, sharded=False)

    Float8Scales.__init__ = alone  # type: ignore[method-assign]


class Broken:
    """As ``test_mutations.Broken``, but by function: what runs in another process is found there by its name."""

    def __init__(self, mutation: Callable[[], None]) -> None:
        self.mutation = mutation

    def __call__(self, rank: int, world: int, store: dist.Store, script: Any) -> ParityRank | None:
        self.mutation()
        return run_parity_rank(rank, world, store, script)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mutation", "layout", "strategy"),
    [
        (scales_of_own_rows, "fsdp=2", "fsdp"),
        (all_reduce_missing, "dp=2", "dp"),
        # Where tensor ranks round by themselves, limits are wide; a sum that is missing is beyond them.
        (norm_not_summed_over_tp, "tp=2", "tp"),
    ],
)
def test_a_mistake_is_more_than_rounding(
    make_prover: Callable[..., Prover], tiles: Path, mutation: Callable[[], None], layout: str, strategy: str
) -> None:
    prover = make_prover("fp8", Broken(mutation), model__path=tiles)
    (verdict,) = prover.prove([Layout.parse(layout)]).verdicts
    assert not verdict.ok and verdict.strategy == strategy
    assert verdict.differing[0].step == 1


def compiled(rank: int, world: int, store: dist.Store, script: Any) -> ParityRank | None:
    from torch._dynamo.utils import counters

    program.BACKEND = "aot_eager"  # the compiler's graphs without its kernels, which take long to make
    seen = run_parity_rank(rank, world, store, script)  # type: ignore[arg-type]
    assert (counters["stats"]["unique_graphs"] > 0) == script.job.compilation.on
    return seen


@pytest.mark.parametrize("layout", SHIPPED)
def test_a_run_as_it_ships_is_the_same_in_every_layout(
    make_prover: Callable[..., Prover], tiles: Path, layout: str
) -> None:
    """Compiled blocks, the fused loss and fp32 masters against one process that runs eager."""
    eager = make_prover("bf16", model__path=tiles)
    eager.reference(Layout())
    config = eager.config.model_copy(
        update={"compile": eager.config.compile.model_copy(update={"enabled": True})}
    )
    (verdict,) = replace(eager, config=config, rehearse=compiled).prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"


def test_strict_mode_refuses_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["parity", "--layouts", "dp=2", "--strict", "--precision", "fp8"])
    assert ended.value.code == 2
    assert "scales of activations depend on the micro-batch" in capsys.readouterr().err
