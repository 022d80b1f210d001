"""Every optimizer in every kind of layout, against one process: what it needs whole, it has whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.facts.layout import Layout
from shoal.prove.parity import Prover

Make = Callable[..., Prover]

# Rows, flat chunks and boxes of matrices; heads that tensor ranks share; several stages; replicas of all that.
LAYOUTS = (
    "dp=2",
    "fsdp=2",
    "fsdp=3,zero=1",
    "fsdp=2,zero=2,micro=1",
    "tp=2",
    "tp=4,sp=0",
    "cp=2",
    "pp=2",
    "fsdp=2,tp=2",
    "fsdp=2,zero=1,tp=2",
    "dp=2,fsdp=2",
    "tp=2,pp=2,schedule=zbv",
    "fsdp=2,zero=2,pp=2,schedule=interleaved",
)
# Experts spread over shards, over copies, over both, with tensor ranks and stages; some with few experts a rank, of
# which zero=3 cuts the rows.
OF_EXPERTS = (
    "fsdp=2,ep=2",
    "fsdp=4,ep=2",
    "fsdp=2,zero=1,ep=2",
    "dp=2,fsdp=2,ep=4",
    "fsdp=2,tp=2,ep=2",
    "fsdp=2,zero=2,pp=2,ep=2",
)
QUICK = ("fsdp=3,zero=1", "tp=4,sp=0", "fsdp=2,tp=2", "fsdp=2,zero=2,pp=2,schedule=interleaved")
QUICK_EXPERTS = ("fsdp=4,ep=2", "fsdp=2,tp=2,ep=2")
OPTIMIZERS = ("muon", "adafactor", "lion")


def settings(optimizer: str) -> dict[str, object]:
    found: dict[str, object] = {
        "recipe__optimizer": optimizer,
        "recipe__lr": 1e-3,
        "recipe__warmup": 0,
        "recipe__batch": 12,
    }
    return {**found, "recipe__adamw_lr": 3e-3} if optimizer == "muon" else found


def check(prover: Prover, layout: str) -> None:
    (verdict,) = prover.prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
    assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "layout", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in LAYOUTS]
)
def test_no_layout_changes_what_an_optimizer_does(make_prover: Make, optimizer: str, layout: str) -> None:
    check(make_prover("fp64", **settings(optimizer)), layout)


@pytest.fixture(scope="session")
def experts(small_family: Callable[[str], str]) -> str:
    return small_family("qwen3-30b-a3b")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "layout",
    [one if one in QUICK_EXPERTS else pytest.param(one, marks=pytest.mark.long) for one in OF_EXPERTS],
)
def test_every_experts_matrix_is_one_by_itself(
    make_prover: Make, experts: str, optimizer: str, layout: str
) -> None:
    check(make_prover("fp64", model__path=experts, **{**settings(optimizer), "recipe__batch": 8}), layout)
