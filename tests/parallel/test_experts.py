"""Experts on several ranks: the run of one process, with ranks that no token reaches and tokens that travel once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parallel.sharding import Case, assert_equal, batches, place, steps, train
from tests.ranks import run_ranks
from tests.thinned import thinned
from torch import Tensor, nn

from shoal.facts.layout import RECOMPUTES, Layout
from shoal.facts.model import Experts
from shoal.facts.model.presets import PRESETS
from shoal.models.decoder import Network, build
from shoal.models.initial import initialise
from shoal.models.router import Router, RouterLosses
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel.compile import CompiledBlocks
from shoal.parallel.compile_parts import InParts
from shoal.parallel.experts import mixtures
from shoal.parallel.token_exchange import TokenExchange

FEW = {"family": "qwen3_moe", "experts": Experts(count=4, active=2, ffn=10)}
# Far more than there are tokens: most have none, and so have ranks.
MANY = {"family": "qwen3_moe", "experts": Experts(count=64, active=1, ffn=4, normalized=False)}
# As DeepSeek-V3: every token uses one more expert, and the first layer has none but that.
SHARED = {
    "family": "deepseek_v3",
    "experts": Experts(
        count=4, active=2, ffn=10, shared=1, shared_ffn=10, dense_layers=(0,), score="sigmoid", scale=2.5
    ),
}
CASES = [
    Case("dp=2,ep=2", FEW),
    Case("dp=2,ep=2", SHARED),
    Case("fsdp=2,ep=2,recompute=full", SHARED),
    Case("dp=4,ep=4", MANY, micro_batches=2),
    Case("fsdp=4,ep=4", MANY, micro_batches=1),
    Case("fsdp=4,ep=2", {**FEW, "tied": True}),
    Case("dp=2,tp=2,ep=2", MANY, micro_batches=4),
    # Fewer experts than ranks that share them: each one's rows are shared out.
    Case("fsdp=4,ep=2", {**FEW, "experts": Experts(count=2, active=1, ffn=10, normalized=False)}),
    Case("fsdp=2,zero=1,pp=2,ep=2", FEW, micro_batches=4),
    Case("dp=2,tp=2,ep=2", SHARED, micro_batches=4),
    # Weights gathered, or kept beside masters, narrower than gradients are summed.
    Case("fsdp=2,ep=2", FEW, dtype=torch.float64, compute=torch.float32, reduce_dtype=torch.float32),
]


@pytest.mark.parametrize(
    "case",
    thinned(CASES[:-1], 2),
    ids=lambda case: f"{case.layout} {case.model.family} {case.model.experts.count}",
)
def test_experts_equal_one_process(case: Case) -> None:
    assert_equal(case, run_ranks(Layout.parse(case.layout).world, train, case))


def masters(rank: int, world: int, case: Case) -> list[tuple[str, torch.dtype, torch.dtype]]:
    placed, mesh = place(case, rank)
    for _ in steps(placed, mesh, case, 1):
        pass
    pieces = [piece for piece in placed.gradients.pieces if ".experts." in piece.name]
    return [(one.name, one.held.parameter.dtype, one.tensor.dtype) for one in pieces]


def test_experts_that_fsdp_does_not_hold_have_masters() -> None:
    """With ``ep`` as large as ``fsdp`` no rank shares them: beside FSDP's shards they are whole, as under dp."""
    for found in run_ranks(2, masters, CASES[-1]):
        assert len(found) == 2 * 4
        assert {kinds for _, *kinds in map(tuple, found) for kinds in [tuple(kinds)]} == {
            (torch.float32, torch.float64)
        }


def as_it_is(kind: str, plain: Callable[..., Any], module: nn.Module, *arguments: Any) -> Any:
    """In the place of a graph."""
    return plain(module, *arguments)


def events(rank: int, world: int, case: Case, in_parts: bool) -> list[str]:
    """Of one layer with experts and one micro-batch, in order: exchanges begun and waited for, what was computed.

    ``in_parts``: as compiled blocks call them.
    """
    placed, mesh = place(case, rank)
    seen: list[str] = []
    begin, wait = TokenExchange.begin, TokenExchange.wait

    def begun(self: TokenExchange, rows: Tensor, back: bool = False) -> Tensor:
        seen.append("begin")
        return begin(self, rows, back)

    def waited(self: TokenExchange) -> Tensor:
        seen.append("wait")
        return wait(self)

    TokenExchange.begin, TokenExchange.wait = begun, waited  # type: ignore[method-assign]
    (segment,) = placed.segments
    block = segment.network.model.layers["1"]
    (mixture,) = mixtures(block)
    if in_parts:
        block.forward = InParts(block, as_it_is, mesh.layout.recompute)
    for name, module in (("routed", mixture.experts), ("shared", mixture.shared_experts)):
        module.get_submodule("up_proj" if name == "shared" else "gate_up_proj").register_forward_hook(
            lambda *_, name=name: seen.append(name)
        )
        for parameter in module.parameters():
            parameter.register_hook(lambda _, name=name: seen.append(f"{name}'s gradient"))
    (batch, *_) = batches(case, mesh)
    placed.gradients.start_step()
    placed.executor.forward_backward([batch], 1.0)
    return seen


@pytest.mark.parametrize(
    ("recompute", "in_parts"), [*((one, False) for one in RECOMPUTES), ("none", True), ("full", True)]
)
def test_shared_experts_are_computed_while_tokens_travel(recompute: str, in_parts: bool) -> None:
    """And in the backward pass while their gradients do."""
    case = Case(f"dp=2,ep=2,recompute={recompute}", {**SHARED, "layers": 2})
    forward = ["begin", "shared", "wait", "routed", "begin", "wait"]
    backward = [
        *("begin", "wait"),
        *["routed's gradient"] * 2,
        "begin",
        *["shared's gradient"] * 3,
        "wait",
    ]
    again = [] if recompute == "none" else forward
    for seen in run_ranks(2, events, case, in_parts):
        assert seen == [*forward, *again, *backward]


def sent(rank: int, world: int, case: Case) -> list[tuple[int, int]]:
    """Of one step: (bytes of all exchanges of tokens, how many tokens each rank's experts have received)."""
    placed, mesh = place(case, rank)
    with CollectiveCounter(mesh.names, log=True) as counter:
        placed.gradients.start_step()
        placed.executor.forward_backward(batches(case, mesh), 1.0)
        placed.gradients.finish_step()
    calls = [call for call in counter.calls if call.op == "all_to_all"]
    assert {call.group for call in calls} == {"ep"}
    return [(call.bytes, call.bytes) for call in calls if call.dtype != "int64"]


def test_a_token_travels_once_whatever_tp_is() -> None:
    alone = run_ranks(2, sent, Case("dp=2,ep=2", FEW))
    split = run_ranks(4, sent, Case("dp=2,tp=2,ep=2", FEW))
    for index, ranks in enumerate(((0, 1), (2, 3))):
        whole = [size for size, _ in alone[index]]
        assert whole and min(whole) > 0
        for rank in ranks:
            assert [2 * size for size, _ in split[rank]] == whole


def test_compiled_blocks_count_and_compute_as_eager_ones() -> None:
    model = PRESETS["tiny-moe"].model_copy(update={"layers": 2})
    tokens = torch.randint(0, 264, (2, 32), generator=torch.Generator().manual_seed(0))
    found: list[tuple[Network, list[Router]]] = []
    for compiled in (False, True):
        losses = RouterLosses(0.1, 0.01)
        network = build(model, compute=torch.bfloat16, dtype=torch.bfloat16, device="cpu", router=losses)
        initialise(network, model, seed=1)
        routers = [module for module in network.modules() if isinstance(module, Router)]
        for router in routers:
            router.prepare(torch.device("cpu"))
            router.start_step(1.0)
        blocks = (
            CompiledBlocks(list(network.model.layers.values()), "none", "aot_eager") if compiled else None
        )
        loss, _ = network.lm_head(network(tokens, torch.arange(32).expand(2, 32)), tokens)
        loss.backward()
        assert blocks is None or blocks.problem is None
        found.append((network, routers))
    (eager, counted), (graph, again) = found
    for (name, one), other in zip(eager.named_parameters(), graph.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    assert all(
        torch.equal(one.tally.grad, other.tally.grad) for one, other in zip(counted, again, strict=True)
    )
    assert sum(float(router.tally.grad[:-2].sum()) for router in again) == 2 * 2 * 64
