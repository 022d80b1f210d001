"""Every optimizer in every kind of layout, against one process: what it needs whole, it has whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from tests.predict.counted import ask
from tests.thinned import rest, thinned

from shoal.facts.layout import Layout
from shoal.prove.dryrun import dryrun, first_rank
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
    "dp=2,ep=2",
    "fsdp=2,ep=2",
    "fsdp=4,ep=2",
    "fsdp=2,zero=1,ep=2",
    "dp=2,fsdp=2,ep=4",
    "fsdp=2,tp=2,ep=2",
    "fsdp=2,zero=2,pp=2,ep=2",
)
QUICK = ("fsdp=3,zero=1", "tp=4,sp=0", "fsdp=2,tp=2", "fsdp=2,zero=2,pp=2,schedule=interleaved")
QUICK_EXPERTS = ("fsdp=4,ep=2", "fsdp=2,tp=2,ep=2", "fsdp=2,zero=1,ep=2")
GROUPS = '[{match = "*.q_proj.weight", lr = 3e-3, weight_decay = 0.5}, {match = "*norm*", lr = 1e-4}]'
OPTIMIZERS = ("muon", "adafactor", "lion")


def in_turns(layouts: tuple[str, ...], quick: tuple[str, ...]) -> list[Any]:
    """Every layout with every optimizer. ``make test`` has the quick ones, each with an optimizer of its own."""
    turns = {(layout, OPTIMIZERS[number % len(OPTIMIZERS)]) for number, layout in enumerate(quick)}
    return rest(product(layouts, OPTIMIZERS), turns.__contains__)


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
    if prover.config.recipe.optimizer in (
        "muon",
        "adafactor",
    ):  # AdamW and Lion magnify what is almost nothing
        assert verdict.max_param_diff <= 1e-12


@pytest.mark.parametrize(("layout", "optimizer"), in_turns(LAYOUTS, QUICK))
def test_no_layout_changes_what_an_optimizer_does(make_prover: Make, optimizer: str, layout: str) -> None:
    check(make_prover("fp64", **settings(optimizer)), layout)


@pytest.fixture(scope="session")
def experts(small_family: Callable[[str], str]) -> str:
    return small_family("qwen3-30b-a3b")


@pytest.mark.parametrize(("layout", "optimizer"), in_turns(OF_EXPERTS, QUICK_EXPERTS))
def test_every_experts_matrix_is_one_by_itself(
    make_prover: Make, experts: str, optimizer: str, layout: str
) -> None:
    check(make_prover("fp64", model__path=experts, **{**settings(optimizer), "recipe__batch": 8}), layout)


AVERAGED = {"recipe__ema": 0.9, "evaluate__ema": "true", "recipe__groups": GROUPS}


@pytest.mark.parametrize("layout", thinned(["fsdp=2,tp=2", "fsdp=3,zero=1", "pp=2"], 2))
def test_no_layout_changes_groups_and_averages(make_prover: Make, layout: str) -> None:
    check(make_prover("fp64", **AVERAGED, **settings("adamw")), layout)


FROZEN = '[{match = "model.layers.0.*", frozen = true}, {match = "*.mlp.*", frozen = true}]'


@pytest.mark.parametrize(
    "layout", thinned(["fsdp=3,zero=2", "dp=2,fsdp=2", "tp=2,pp=2,schedule=zbv", "fsdp=2,tp=2"], 2)
)
def test_no_layout_changes_what_is_frozen(make_prover: Make, layout: str) -> None:
    check(make_prover("fp64", recipe__groups=FROZEN, **settings("adamw")), layout)


@pytest.mark.parametrize(
    ("layout", "optimizer", "options"),
    [
        ("dp=1", "lion", {"ema": 0.9}),
        ("tp=2", "muon", {}),
        ("fsdp=2,zero=1", "muon", {"precision": "bf16"}),
        ("fsdp=2,tp=2", "muon", {"precision": "bf16", "ema": 0.9}),
        ("pp=2", "adafactor", {}),
        ("fsdp=2,zero=1", "adafactor", {"precision": "bf16"}),
        ("fsdp=4", "adamw", {"ema": 0.9}),
    ],
)
def test_an_optimizer_costs_what_is_predicted(layout: str, optimizer: str, options: dict[str, Any]) -> None:
    """Few tokens: the update is the fullest moment of most of these."""
    workload = ask(layout, {"layers": 4, "vocab": 200}, seq=8, optimizer=optimizer, **options)
    assert dryrun(workload, first_rank(workload.layout, workload.layout.pp - 1)).differences(0) == []


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.parametrize("layout", thinned(["fsdp=4,ep=2", "fsdp=2,tp=2,ep=2", "dp=2,fsdp=2,zero=1,ep=4"], 3))
def test_traffic_of_experts_matrices_is_predicted(layout: str, optimizer: str) -> None:
    experts = {"count": 4, "active": 2, "ffn": 96}
    workload = ask(layout, {"experts": experts, "family": "qwen3_moe"}, seq=16, optimizer=optimizer)
    for rank in (0, workload.layout.world - 1):
        assert dryrun(workload, rank).matches


@pytest.mark.long
def test_both_ends_of_a_tied_embedding_stay_equal(make_prover: Make) -> None:
    """Three ranks add up in an order that depends on where in a message something is, and the ends' differ."""
    prover = make_prover("fp64", **settings("adafactor"))
    check(prover, "fsdp=3,pp=2")
    check(prover, "fsdp=3,zero=1,pp=2,schedule=zbv")
    for layout in ("fsdp=3,pp=2", "dp=2,fsdp=2,tp=2,pp=2", "fsdp=3,pp=2,schedule=zbv,chunks=2"):
        workload = ask(layout, {"tied": True, "layers": 4}, seq=16, batch=12, optimizer="adafactor")
        for stage in (0, 1):
            assert dryrun(workload, first_rank(workload.layout, stage)).matches, layout
