"""Layouts against one process, for real: a set that covers every value of every key and every pair of strategies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.thinned import thinned

from shoal.cli.main import main
from shoal.facts.layout import CONTEXT_KINDS, RECOMPUTES, SCHEDULES, Layout
from shoal.prove import coverage
from shoal.prove.parity import Prover

# Every value of every key: what ``make test`` runs.
QUICK = (
    "dp=2,micro=2",
    "fsdp=2,zero=1,recompute=full",
    "dp=2,fsdp=2,unit=2,recompute=selective",
    "tp=4,sp=0,recompute=selective",
    "pp=2,schedule=gpipe,recompute=selective",
    "dp=2,pp=2,schedule=zbv",
    "pp=4,recompute=full",
    "fsdp=2,pp=2,schedule=zb",
    "tp=2,pp=2,schedule=interleaved",
    "fsdp=2,zero=2,tp=2,pp=2,schedule=dualpipev",
    "cp=4,cp_kind=ulysses",
    "zero=1,cp=2,recompute=full",
    "fsdp=2,cp=2",
)
# With every pair: the covering subset of ``shoal parity --layouts full`` that the test suite runs.
COVERING = (
    *QUICK,
    "fsdp=2,zero=2,micro=1",
    "dp=2,tp=2,recompute=full",
    "fsdp=2,tp=2",
    "dp=2,cp=2,cp_kind=ulysses,micro=2",
    "tp=2,cp=2,recompute=selective",
    "fsdp=2,zero=2,cp=2,pp=2",
    "tp=2,cp=2,cp_kind=ulysses,pp=2",
)
STRICT = ("dp=2", "fsdp=4,zero=1", "pp=2,schedule=zb", "fsdp=2,pp=2,schedule=zbv", "dp=2,fsdp=2,zero=2,pp=2")


def strategies(layout: Layout) -> set[str]:
    found = {axis for axis in ("dp", "fsdp", "tp", "cp", "pp") if getattr(layout, axis) > 1}
    return found | ({"recompute"} if layout.recompute != "none" else set())


@pytest.mark.parametrize("chosen", [QUICK, COVERING, coverage.FULL], ids=["quick", "covering", "full"])
def test_every_value_is_covered(chosen: tuple[str, ...]) -> None:
    layouts = [Layout.parse(text) for text in chosen]
    assert {layout.schedule for layout in layouts if layout.pp > 1} == set(SCHEDULES)
    assert {layout.recompute for layout in layouts} == set(RECOMPUTES)
    assert {layout.zero for layout in layouts if layout.fsdp > 1} == {1, 2, 3}
    assert {layout.sp for layout in layouts if layout.tp > 1} == {True, False}
    assert {layout.cp_kind for layout in layouts if layout.cp > 1} == set(CONTEXT_KINDS)
    assert (
        {layout.unit > 1 for layout in layouts} == {layout.chunks > 1 for layout in layouts} == {True, False}
    )
    assert {layout.micro is not None for layout in layouts} == {True, False}
    assert any(len(strategies(layout) - {"recompute"}) == 3 for layout in layouts)


@pytest.mark.parametrize("chosen", [COVERING, coverage.FULL], ids=["covering", "full"])
def test_every_pair_is_covered(chosen: tuple[str, ...]) -> None:
    layouts = [Layout.parse(text) for text in chosen]
    assert {layout.zero for layout in layouts if layout.cp > 1} == {1, 2, 3}
    pairs = {frozenset(pair) for layout in layouts for pair in itertools.combinations(strategies(layout), 2)}
    wanted = itertools.combinations(("dp", "fsdp", "tp", "cp", "pp", "recompute"), 2)
    assert pairs == {frozenset(pair) for pair in wanted}


def test_the_full_set_is_large_enough() -> None:
    layouts = [Layout.parse(text) for text in coverage.FULL]
    assert len(set(layouts)) == len(coverage.FULL) >= 36
    assert {layout.world for layout in layouts} == {2, 4, 8}
    # Each level of zero meets tensor and pipeline parallelism, and three axes at once every one of them.
    for zero, axis in itertools.product((1, 2, 3), ("tp", "cp", "pp")):
        assert any(
            layout.fsdp > 1 and layout.zero == zero and getattr(layout, axis) > 1 for layout in layouts
        )


@pytest.mark.parametrize(
    "layout", [*QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in COVERING[len(QUICK) :])]
)
def test_no_layout_changes_the_run(make_prover: Callable[..., Prover], layout: str) -> None:
    (verdict,) = make_prover("fp64").prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
    assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12
    assert len(verdict.losses) == 2


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_context_ranks_keep_documents_and_windows(
    make_prover: Callable[..., Prover], small_family: Callable[[str], str], kind: str
) -> None:
    """Rows of several documents, a window shorter than a rank's piece reaches, fewer key/value heads than ranks."""
    path = small_family("mistral-7b")
    shape = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**shape, "sliding_window": 5, "num_key_value_heads": 1}))
    prover = make_prover("fp64", model__path=path, data__packing="true", data__within_documents="true")
    (verdict,) = prover.prove([Layout.parse(f"cp=4,cp_kind={kind}")]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
    assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12


@pytest.mark.parametrize("preset", [pytest.param("gemma2-2b", marks=pytest.mark.long), "gemma3-1b"])
def test_gemma_in_every_layout(
    make_prover: Callable[..., Prover], small_family: Callable[[str], str], preset: str
) -> None:
    """Windows by turns, capped scores and logits, two rotary bases, a tied head of scaled embeddings; packed rows."""
    path = small_family(preset)
    prover = make_prover("fp64", model__path=path, data__packing="true", data__within_documents="true")
    layouts = ("fsdp=2", "tp=2", "pp=2", "cp=2", "cp=2,cp_kind=ulysses", "tp=2,pp=2,recompute=full")
    for verdict in prover.prove([Layout.parse(layout) for layout in layouts]).verdicts:
        assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
        assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12


@pytest.mark.parametrize(
    "layout", thinned(["tp=2", "fsdp=2,micro=2", "dp=2,pp=2,schedule=interleaved", "cp=2"], 2)
)
def test_in_single_precision_within_rounding(make_prover: Callable[..., Prover], layout: str) -> None:
    (verdict,) = make_prover("fp32").prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, verdict.reason
    assert verdict.max_grad_diff > 0  # the comparison has seen something


@pytest.mark.parametrize("layout", thinned(STRICT, 2))
def test_strict_mode_is_equal_to_the_bit(make_prover: Callable[..., Prover], layout: str) -> None:
    (verdict,) = make_prover("fp32", run__strict="true").prove([Layout.parse(layout)]).verdicts
    assert verdict.ok and verdict.bit_identical, verdict.reason
    assert verdict.max_loss_diff == verdict.max_grad_diff == verdict.max_param_diff == 0


@pytest.mark.parametrize(
    "family",
    ["gpt2", "pythia-6.9b", "qwen3-8b"],
    ids=["learned positions", "parallel residual", "head norms"],
)
def test_other_families(
    make_prover: Callable[..., Prover], small_family: Callable[[str], str], family: str
) -> None:
    prover = make_prover("fp64", model__path=small_family(family))
    for verdict in prover.prove(
        [Layout.parse("fsdp=2,tp=2"), Layout.parse("tp=2,pp=2,schedule=zbv")]
    ).verdicts:
        assert verdict.ok, f"{verdict.layout}: {verdict.reason}"
        assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12


def test_the_command_prints_the_contract(
    make_prover: Callable[..., Prover], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_prover("fp64").config
    settings = ("model.path", "data.source", "data.cache", "recipe.seq", "recipe.batch", "cluster.on")
    values = config.model_dump()
    arguments = [f"--set={name}={values[name.split('.')[0]][name.split('.')[1]]}" for name in settings]
    with pytest.raises(SystemExit) as ended:
        main(["parity", "--layouts", "dp=2; tp=2", "--steps", "1", "--json", *arguments])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == 1 and document["precision"] == "fp64"
    assert len(document["reference"]["losses"]) == 1
    assert [row["layout"] for row in document["layouts"]] == ["dp=2", "tp=2"]
    for row in document["layouts"]:
        assert row["ok"] and row["max_loss_diff"] <= 1e-12 and row["max_grad_diff"] <= 1e-12
        assert row["seconds"] > 0 and row["max_param_diff"] < 1e-8
    assert [other["precision"] for other in document["also"]] == ["fp32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "tp=3;dp=5"], "tp=3 does not divide the 8 attention heads"),
        (["--layouts", "tp=3;dp=5"], "batch=16 does not divide by dp·fsdp = 5"),
        (["--layouts", "tp=3;dp=5"], "nearest legal layouts: tp=4; tp=2; tp=8"),
        (["--layouts", " ; "], "--layouts is empty"),
        (["--layouts", "dp=2", "--steps", "0"], "--steps 0"),
        (["--layouts", "tp=2", "--strict"], "run.strict"),
    ],
)
def test_bad_input_comes_all_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["parity", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
