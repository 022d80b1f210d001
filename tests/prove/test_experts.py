"""A model with experts in every kind of layout, against one process; and expert parallelism broken on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.predict.counted import ask
from tests.thinned import thinned
from torch import Tensor

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.layout.legality import Case, broken
from shoal.facts.model import Experts, Latent
from shoal.facts.model.huggingface.read import read_config
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.experts import Compute
from shoal.parallel.dispatch import Features, TokensInFlight
from shoal.parallel.dispatch_by_node import TokenChunk
from shoal.parallel.router_tally import RouterTally
from shoal.predict.traffic import traffic
from shoal.predict.workload import Workload
from shoal.prove import coverage, prepare
from shoal.prove.dryrun import dryrun, first_rank
from shoal.prove.parity import Prover
from shoal.prove.parity_rank import ParityRank, run_parity_rank

# Of ``coverage.EXPERTS``, what the test suite runs.
COVERING = (
    "dp=2,ep=2",
    "fsdp=2,zero=2,ep=2,recompute=full",
    "dp=4,ep=4,recompute=selective",
    "fsdp=4,ep=2",
    "dp=2,fsdp=2,ep=4,micro=1",
    "dp=2,fsdp=2,zero=1,ep=2",
    "dp=2,tp=2,sp=0,ep=2",
    "fsdp=2,tp=2,ep=2,recompute=selective",
    "fsdp=2,zero=1,pp=2,ep=2,schedule=interleaved",
    "fsdp=2,tp=2,pp=2,ep=2",
    "cp=2,ep=2",
    "fsdp=2,cp=2,cp_kind=ulysses,ep=2",
    "tp=2,cp=2,pp=2,ep=2",
)
Make = Callable[..., Prover]


@pytest.fixture
def prover_of_experts(make_prover: Make, small_family: Callable[[str], str]) -> Make:
    def make(run: Any = run_parity_rank, family: str = "qwen3-30b-a3b", **other: Any) -> Prover:
        losses = {"recipe__router_aux": 0.1, "recipe__router_z": 0.01}
        return make_prover("fp64", run, model__path=small_family(family), **losses, **other)

    return make


@pytest.fixture(scope="session")
def small_family(small_family: Callable[[str], str]) -> Callable[[str], str]:
    """One file for each, so that provers share their reference."""
    made: dict[str, str] = {}
    return lambda preset: (
        made.setdefault(preset, "") or made.update({preset: small_family(preset)}) or made[preset]
    )


@pytest.mark.parametrize(
    "layout",
    [
        layout if number % 2 == 0 else pytest.param(layout, marks=pytest.mark.long)
        for number, layout in enumerate(COVERING)
    ],
)
def test_no_layout_changes_the_run(prover_of_experts: Make, layout: str) -> None:
    (verdict,) = prover_of_experts().prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
    assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12


# Nodes of the cluster; the model's eight experts are on all of them.
ON_NODES = [
    ("2x2xcpu", "dp=4,ep=4"),
    pytest.param("2x2xcpu", "fsdp=4,ep=4,recompute=full", marks=pytest.mark.long),
    pytest.param("2x4xcpu", "fsdp=4,tp=2,ep=4,micro=1", marks=pytest.mark.long),
    pytest.param("4x2xcpu", "dp=2,fsdp=4,zero=1,ep=8,micro=1", marks=pytest.mark.long),
    pytest.param("2x4xcpu", "fsdp=4,cp=2,ep=8,micro=2", marks=pytest.mark.long),
    pytest.param("4x2xcpu", "fsdp=4,pp=2,ep=4,micro=1", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("cluster", "layout"), ON_NODES)
def test_nor_do_nodes(prover_of_experts: Make, cluster: str, layout: str) -> None:
    (verdict,) = prover_of_experts(cluster__on=cluster).prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
    assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12


def test_routing_is_seen(prover_of_experts: Make) -> None:
    """What is compared is not empty: every token to two of eight experts, in every layer, and not evenly."""
    for load in prover_of_experts().reference(Layout()).routed:
        assert load is not None
        assert [sum(layer) for layer in load.sent] == [2 * 8 * 16] * 4
        assert load.imbalance > 1.1 and load.balance > 4 * 8 and load.z > 0


def test_the_full_set_has_every_axis_with_experts() -> None:
    layouts = [Layout.parse(text) for text in coverage.EXPERTS]
    assert len(set(layouts)) == len(layouts) == 28 and all(layout.ep > 1 for layout in layouts)
    assert {layout.world for layout in layouts} == {2, 4, 8}
    for key in ("dp", "fsdp", "tp", "cp", "pp"):
        assert any(getattr(layout, key) > 1 for layout in layouts), key
    assert {layout.zero for layout in layouts if layout.fsdp > 1} == {1, 2, 3}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert {layout.sp for layout in layouts if layout.tp > 1} == {True, False}
    assert set(COVERING) - set(coverage.EXPERTS) <= {
        "dp=2,fsdp=2,zero=1,ep=2",
        "dp=2,tp=2,sp=0,ep=2",
        "fsdp=2,tp=2,pp=2,ep=2",
    }


DEEPSEEK = Path(__file__).parents[2] / "benchmarks" / "data" / "small_deepseek.json"


def test_layouts_of_many_axes_are_legal_and_part_of_the_full_set() -> None:
    model, recipe = read_config(DEEPSEEK), Recipe(seq=32, batch=16)
    assert model.latent is not None and model.experts is not None and model.experts.shared
    layouts = [Layout.parse(text) for text in coverage.MANY_AXES]
    assert len(set(layouts)) == len(layouts) == 18
    assert (
        {*coverage.EXPERTS, *coverage.MANY_AXES} == set(prepare.SETS["experts"]) <= set(prepare.SETS["full"])
    )
    for layout in layouts:
        assert not list(broken(Case.of(layout, model, recipe, None, False))), layout
    axes = [sum(getattr(one, key) > 1 for key in ("dp", "fsdp", "tp", "cp", "pp", "ep")) for one in layouts]
    assert {one.world for one in layouts} == {8, 16} and set(axes[:-2]) == {4, 5}
    # As it was published, but narrow: pipeline and experts, with states sharded and parameters whole.
    assert all(one.zero == 1 and one.pp > 1 and one.ep > 1 and one.tp == one.cp == 1 for one in layouts[-3:])


@pytest.mark.long
@pytest.mark.parametrize("layout", [coverage.MANY_AXES[11], coverage.MANY_AXES[-2]])
def test_a_model_like_deepseek_s_in_five_axes_and_in_its_own_layout(make_prover: Make, layout: str) -> None:
    given = {
        "model__path": str(DEEPSEEK),
        "recipe__batch": 16,
        "cluster__on": "16xcpu",
        "fault__timeout": 120,
    }
    (verdict,) = make_prover("fp64", **given).prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"


# Each patches what it breaks, in a rank's own process.


def gradients_doubled() -> None:
    """Of experts' weights alone: results and tokens' gradients are as they should be."""

    def computed(self: Features, compute: Compute, tokens: Tensor, ends: Tensor) -> Tensor:
        again = compute(tokens.detach(), ends)
        return compute(tokens, ends) + again - again.detach()

    Features.computed = computed  # type: ignore[method-assign]


def token_dropped() -> None:
    """As where experts have room for so many and no more: the last copy of a token adds nothing."""
    made = TokensInFlight.results

    def full(self: TokensInFlight, returning: Tensor) -> Tensor:
        results = made(self, returning)
        kept = results.new_ones(len(results), 1)
        kept[-1] = 0
        return results * kept

    TokensInFlight.results = full  # type: ignore[method-assign]


def sent_to_the_next_expert() -> None:
    """Of what a rank receives, every expert's last token."""
    made = TokensInFlight.computed

    def off_by_one(self: TokensInFlight, arriving: Tensor, compute: Compute) -> Tensor:
        def wrong(here: Tensor, at: Tensor) -> Tensor:
            return compute(here, torch.cat([(at[:-1] - 1).clamp(min=0), at[-1:]]))

        return made(self, arriving, wrong)

    TokensInFlight.computed = off_by_one  # type: ignore[method-assign]


def losses_averaged_by_rank() -> None:
    start, init = RouterTally.start_step, RouterTally.__init__

    def counted(self: Any, segments: Any, model: Any, mesh: Any) -> None:
        init(self, segments, model, mesh)
        self.ranks = mesh.layout.data_ranks

    RouterTally.__init__ = counted  # type: ignore[method-assign]
    RouterTally.start_step = lambda self, scale: start(self, scale / self.ranks)  # type: ignore[method-assign]


def dropped_on_its_way_inside() -> None:
    """Of what has come from other nodes, the last token: it reaches no expert, and adds nothing."""
    made = TokenChunk._of_this_node

    def one_less(self: TokenChunk, returning: Tensor) -> Tensor:
        kept = torch.ones(sum(self.counts.received), 1, dtype=returning.dtype)
        kept[-1:] = 0
        return made(self, returning) * kept

    TokenChunk._of_this_node = one_less  # type: ignore[method-assign]


MUTATIONS = {
    one.__name__: one
    for one in (
        gradients_doubled,
        token_dropped,
        sent_to_the_next_expert,
        losses_averaged_by_rank,
        dropped_on_its_way_inside,
    )
}


class Broken:
    def __init__(self, mutation: str) -> None:
        self.mutation = mutation

    def __call__(self, rank: int, world: int, store: dist.Store, script: Any) -> ParityRank | None:
        MUTATIONS[self.mutation]()
        return run_parity_rank(rank, world, store, script)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mutation", "layout", "strategy", "tensor"),
    [
        (dropped_on_its_way_inside, "dp=2,ep=2", "ep", "model.embed_tokens.weight"),
        (gradients_doubled, "dp=2,ep=2", "ep", "model.layers.0.mlp.experts.gate_up_proj.weight"),
        (token_dropped, "dp=2,ep=2", "ep", "model.embed_tokens.weight"),
        (sent_to_the_next_expert, "fsdp=2,ep=2", "ep", "model.embed_tokens.weight"),
        (losses_averaged_by_rank, "dp=2", "dp", "model.embed_tokens.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_experts_are_caught_and_named(
    prover_of_experts: Make, mutation: Callable[[], None], layout: str, strategy: str, tensor: str
) -> None:
    nodes = (
        {"cluster__on": f"{Layout.parse(layout).world}x1xcpu"}
        if mutation is dropped_on_its_way_inside
        else {}
    )
    (verdict,) = prover_of_experts(Broken(mutation.__name__), **nodes).prove([Layout.parse(layout)]).verdicts
    assert not verdict.ok
    assert strategy in verdict.strategy.split(", "), (verdict.strategy, verdict.reason)
    first = verdict.differing[0]
    assert first.amount > 1e-6 and first.tensor == tensor, first


# What predict announces, and what the engine does in a dry run.

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"family": "qwen3_moe", "qk_norm": True, "experts": Experts(count=8, active=2, ffn=128)},
    "mixtral": {"family": "mixtral", "experts": Experts(count=2, active=1, ffn=128)},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "kv_heads": 8,
        "latent": Latent(q_rank=48, kv_rank=32, nope_dim=24, rope_dim=8, value_dim=16),
        "experts": Experts(
            count=8, active=2, ffn=128, shared=1, shared_ffn=128, dense_layers=(0,), router_bias=True,
            groups=4, active_groups=2, score="sigmoid", scale=2.5,
        ),
    },
}  # fmt: skip
TWINS = [
    ("qwen3_moe", "dp=2,ep=2", {}),
    ("qwen3_moe", "dp=4,ep=2", {}),
    ("qwen3_moe", "fsdp=4,zero=1,ep=2", {}),
    ("qwen3_moe", "fsdp=4,zero=2,ep=2,micro=1", {"batch": 8}),
    ("qwen3_moe", "fsdp=4,ep=2,micro=1", {"batch": 8}),
    ("qwen3_moe", "dp=2,fsdp=2,ep=2", {}),
    ("qwen3_moe", "dp=2,fsdp=2,ep=4", {}),
    ("qwen3_moe", "dp=2,tp=2,ep=2", {"router_aux": 0.1}),
    ("qwen3_moe", "dp=2,tp=2,sp=0,ep=2,recompute=full", {"router_aux": 0.1}),
    ("qwen3_moe", "fsdp=4,pp=2,ep=2,micro=1", {"batch": 8}),
    # Experts that FSDP gathers, in a forward pass that is repeated: once for each pass, and nothing ahead of it.
    ("qwen3_moe", "fsdp=4,ep=2,micro=1,recompute=full", {"batch": 8}),
    ("deepseek_v3", "fsdp=4,ep=2,micro=1,recompute=selective", {"batch": 8}),
    ("mixtral", "fsdp=4,ep=2", {}),
    ("mixtral", "dp=2,ep=2,recompute=selective", {"router_z": 0.1}),
    ("deepseek_v3", "dp=2,ep=2", {}),
    ("deepseek_v3", "fsdp=4,zero=1,tp=2,ep=2", {}),
    ("deepseek_v3", "fsdp=2,pp=2,ep=2,micro=1,recompute=full", {}),
    ("mixtral", "dp=2,tp=2,ep=2,recompute=full", {}),
    ("qwen3_moe", "fsdp=2,tp=2,ep=2,recompute=selective", {}),
    ("qwen3_moe", "dp=2,tp=2,pp=2,ep=2,micro=1", {"batch": 8}),
    ("qwen3_moe", "fsdp=2,cp=2,ep=2", {}),
]


@pytest.mark.parametrize(("family", "layout", "recipe"), thinned(TWINS, 3), ids=lambda value: str(value))
def test_traffic_is_to_the_byte_what_is_predicted(family: str, layout: str, recipe: dict[str, Any]) -> None:
    asked = ask(layout, SHAPES[family], precision="bf16", **recipe)
    found = dryrun(asked, first_rank(asked.layout, asked.layout.pp - 1))
    assert found.traffic == found.predicted_traffic
    assert any(one.op == "all_to_all" and one.group == "ep" for one in found.traffic)
    # Every state to the byte but for a few counters; the fullest moment of a block is close, not exact.
    for category in ("params", "optimizer"):
        ours, theirs = getattr(found.memory, category), getattr(found.predicted, category)
        assert ours == pytest.approx(theirs, rel=0.001), category
    # Where a forward pass is repeated, tokens that travel beside shared experts are not in the ledger.
    near = 0.015 if asked.layout.recompute == "none" else 0.03
    assert found.memory.peak_allocated == pytest.approx(found.predicted.peak_allocated, rel=near)


# The same across nodes: traffic over both links. Names are families, layouts, and nodes of devices.
ON_NODES_TWINS = [
    ("qwen3_moe", "dp=4,ep=4", "2x2xcpu", {}),
    ("qwen3_moe", "dp=4,ep=4,recompute=full", "4x1xcpu", {}),
    ("deepseek_v3", "fsdp=4,ep=4,micro=1", "2x2xcpu", {"batch": 8}),
    ("deepseek_v3", "fsdp=4,zero=1,tp=2,ep=4", "2x4xcpu", {"router_aux": 0.1}),
    ("qwen3_moe", "fsdp=4,tp=2,ep=4,recompute=full", "4x2xcpu", {}),
    ("qwen3_moe", "fsdp=4,pp=2,ep=4,micro=1", "4x2xcpu", {"batch": 8}),
]


@pytest.mark.parametrize(("family", "layout", "nodes", "recipe"), thinned(ON_NODES_TWINS, 2), ids=str)
def test_as_is_traffic_across_nodes(family: str, layout: str, nodes: str, recipe: dict[str, Any]) -> None:
    asked = replace(ask(layout, SHAPES[family], precision="bf16", **recipe), cluster=find(nodes))
    found = dryrun(asked, first_rank(asked.layout, asked.layout.pp - 1))
    assert found.traffic == found.predicted_traffic
    names = {one.group for one in found.traffic if one.op == "all_to_all"}
    assert (
        names == {one.name for one in asked.expert_nodes if one.size > 1}
        and asked.expert_nodes.across.size > 1
    )
    assert found.memory.peak_allocated == pytest.approx(found.predicted.peak_allocated, rel=0.03)


def test_the_page_has_what_is_predicted() -> None:
    page = (Path(__file__).parents[2] / "docs" / "strategies" / "expert.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([\d,]+), ([\d,]+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for layout, count, size in rows:
        parsed = Layout.parse(layout)
        recipe = Recipe(seq=256, batch=64)
        asked = Workload(PRESETS["tiny-moe"], find(f"{parsed.world}xcpu"), recipe, parsed)
        (sent,) = [one for one in traffic(asked) if one.op == "all_to_all"]
        assert (f"{sent.count:,}", f"{sent.bytes:,}") == (count, size), layout
