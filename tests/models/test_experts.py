"""Experts and their router: no token is lost, ties are settled, and losses are sums of what no layout cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.facts.model import Experts, Model
from shoal.models import grouped_product
from shoal.models.decoder import Network, build
from shoal.models.experts import GroupedLinear, MixtureOfExperts, by_expert
from shoal.models.gated import gated_gradients, way_out
from shoal.models.initial import initialise
from shoal.models.mix import spread_rows
from shoal.models.mlp import ACTIVATIONS
from shoal.models.router import Router, RouterLosses, choose

Shape = Callable[..., Model]
EXPERTS = Experts(count=6, active=2, ffn=16)


def mixture(shape: Shape, losses: RouterLosses | None = None, **changes: Any) -> MixtureOfExperts:
    model = shape(family="qwen3_moe", experts=EXPERTS.model_copy(update=changes), init_std=0.3)
    network = build(model, dtype=torch.float64, device="cpu", router=losses or RouterLosses())
    initialise(network, model, seed=1)
    found = network.model.layers["0"].mlp
    assert isinstance(found, MixtureOfExperts)
    return found


def hidden(rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(rows, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_by_one(mixed: MixtureOfExperts, x: Tensor) -> Tensor:
    """Token by token, expert by expert, as the definition says it."""
    output = torch.zeros_like(x)
    gates_and_ups, downs = mixed.experts.gate_up_proj.weight, mixed.experts.down_proj.weight
    for row, token in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        here = x[row, token]
        scores = (mixed.gate.weight @ here).softmax(0)
        best = scores.topk(2)
        for weight, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            gate, up, down = gates_and_ups[2 * expert], gates_and_ups[2 * expert + 1], downs[expert]
            output[row, token] += weight * (down @ (torch.nn.functional.silu(gate @ here) * (up @ here)))
    return output


def test_as_the_definition_says(shape: Shape) -> None:
    mixed, x = mixture(shape), hidden().requires_grad_()
    names, weights = zip(*mixed.named_parameters(), strict=True)
    with torch.no_grad():  # one that hardly a token wants
        mixed.gate.weight[4] = -mixed.gate.weight.sum(0)
    ours = torch.autograd.grad(mixed(x).square().sum(), (x, *weights))
    wanted = torch.autograd.grad(one_by_one(mixed, x).square().sum(), (x, *weights))
    for name, one, other in zip(("x", *names), ours, wanted, strict=True):
        assert (one - other).abs().max() < 1e-10, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_without_tokens(shape: Shape, dtype: torch.dtype) -> None:
    """All tokens to two of six experts, and not a token at all: zeros for the rest, and no failure."""
    mixed = mixture(shape).to(dtype)
    with torch.no_grad():
        mixed.gate.weight.zero_()  # equal scores: the first two experts
    x = hidden().to(dtype).requires_grad_()
    mixed(x).float().square().sum().backward()
    for name, weight in mixed.experts.named_parameters():
        assert weight.grad is not None
        used = 2 * weight.shape[0] // 6
        assert weight.grad[:used].abs().amax((1, 2)).min() > 0 and not weight.grad[used:].any(), name
    nothing = x[:0].detach().requires_grad_()
    assert mixed(nothing).shape == (0, 16, 32)


def test_a_grouped_product_is_one_product_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    linear = GroupedLinear(4, 16, 24).bfloat16()
    torch.nn.init.normal_(linear.weight)
    x, ends = torch.randn(10, 16).bfloat16().requires_grad_(), torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    assert grouped_product.takes_groups(x, *linear.weight.shape[1:])
    together = linear(x, ends)
    of_both = torch.autograd.grad(together.square().sum(), (x, linear.weight))
    monkeypatch.setattr(grouped_product, "takes_groups", lambda x, *widths: False)
    apart = linear(x, ends)
    assert torch.allclose(together, apart, rtol=0.01, atol=0.05)
    for one, other in zip(
        of_both, torch.autograd.grad(apart.square().sum(), (x, linear.weight)), strict=True
    ):
        assert torch.allclose(one, other, rtol=0.02, atol=0.5)


def test_of_equal_scores_the_first_expert_wins() -> None:
    scores = torch.zeros(2, 5, 64)
    assert choose(scores, Experts(count=64, active=3, ffn=1)).tolist() == [[[0, 1, 2]] * 5] * 2
    scores[..., 7] = scores[..., 40] = 1
    assert choose(scores, Experts(count=64, active=3, ffn=1))[0, 0].tolist() == [7, 40, 0]


def test_sorted_tokens_find_their_way_back() -> None:
    chosen = torch.tensor([3, 0, 3, 1, 0, 3])
    order = by_expert(chosen, 5)
    assert order.place.tolist() == [1, 4, 3, 0, 2, 5] and order.ends.tolist() == [2, 3, 3, 6, 6]
    assert torch.equal(order.place[order.back], torch.arange(6))


# The losses.


def counted(mixed: MixtureOfExperts, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The router's gradient from its losses alone, and what it has counted."""
    mixed.gate.prepare(x.device)
    mixed.gate.start_step(scale)
    (mixed(x) * 0).sum().backward()
    gradient, mixed.gate.weight.grad = mixed.gate.weight.grad, None
    assert gradient is not None and mixed.gate.tally.grad is not None
    return gradient, mixed.gate.tally.grad


def test_the_losses_are_what_their_formulas_say(shape: Shape) -> None:
    mixed, x = mixture(shape, RouterLosses(0.3, 0.02)), hidden()
    gradient, tally = counted(mixed, x)
    logits = x @ mixed.gate.weight.T
    scores = logits.softmax(-1)
    chosen = scores.topk(2).indices
    balance = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        sent = chosen[row].flatten().bincount(minlength=6)
        balance = balance + 6 / (2 * 16**2) * (sent * scores[row].sum(0)).sum()
    z = logits.logsumexp(-1).square().sum()
    (wanted,) = torch.autograd.grad(0.3 * balance + 0.02 * z, mixed.gate.weight)
    assert (gradient - wanted).abs().max() < 1e-12
    assert tally[:6].tolist() == chosen.flatten().bincount(minlength=6).tolist()
    assert (tally[6:] - torch.stack([balance, z])).abs().max() < 1e-10


def test_the_losses_of_rows_add_up(shape: Shape) -> None:
    """However sequences are spread over micro-batches and ranks: that is why they are per sequence."""
    mixed, x = mixture(shape, RouterLosses(0.3, 0.02)), hidden(4)
    whole = counted(mixed, x)
    for parts in ([x[:1], x[1:]], [x[[3, 1]], x[[0, 2]]]):
        found = [counted(mixed, part) for part in parts]
        for one, *others in zip(whole, *found, strict=True):
            assert (one - sum(others)).abs().max() < 1e-11
    # Not so what a micro-batch's own balance would be.
    assert (counted(mixed, x.reshape(1, 64, 32))[1][6] - whole[1][6] / 4).abs() > 1e-3


def test_an_even_spread_has_a_balance_of_one(shape: Shape) -> None:
    mixed = mixture(shape, RouterLosses(1.0, 0.0), count=4, active=4)
    _, tally = counted(mixed, hidden(2))
    assert tally[:4].tolist() == [32.0] * 4 and abs(float(tally[4]) - 2) < 1e-12


def test_a_repeated_forward_pass_counts_once(shape: Shape) -> None:
    mixed, x = mixture(shape, RouterLosses(0.3, 0.02)), hidden().requires_grad_()
    once = counted(mixed, x)
    mixed.gate.start_step(1.0)
    (checkpoint(mixed, x, use_reentrant=False) * 0).sum().backward()
    assert torch.equal(mixed.gate.weight.grad, once[0]) and torch.equal(mixed.gate.tally.grad, once[1])


def test_the_loss_itself_stays_what_it_was(shape: Shape, rows: tuple[Tensor, Tensor]) -> None:
    """Losses of routers are in the gradients, not in what is reported; and an evaluation counts nothing."""

    def run(losses: RouterLosses) -> tuple[Network, Tensor]:
        model = shape(family="mixtral", experts=EXPERTS, init_std=0.3)
        network = build(model, dtype=torch.float64, compute=torch.float64, device="cpu", router=losses)
        initialise(network, model, seed=1)
        routers = [module for module in network.modules() if isinstance(module, Router)]
        for router in routers:
            router.prepare(torch.device("cpu"))
            router.start_step(1.0)
        with torch.no_grad():
            network(*rows)
        assert all(router.tally.grad is None for router in routers)
        loss, _ = network.lm_head(network(*rows), rows[0])
        loss.backward()
        return network, loss

    (plain, loss), (routed, same) = run(RouterLosses()), run(RouterLosses(0.5, 0.5))
    assert loss == same
    moved = {
        name: float((one.grad - other.grad).abs().max())
        for (name, one), other in zip(plain.named_parameters(), routed.parameters(), strict=True)
    }
    assert moved["model.layers.0.mlp.gate.weight"] > 1e-3 and moved["model.layers.1.mlp.gate.weight"] > 1e-3
    assert moved["lm_head.weight"] == 0


def test_in_half_precision_routing_is_still_in_single(shape: Shape) -> None:
    mixed = mixture(shape).to(torch.bfloat16)
    weights, chosen = mixed.gate(hidden().bfloat16())
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64
    wanted = (hidden().bfloat16().float() @ mixed.gate.weight.float().T).softmax(-1)
    assert torch.equal(chosen, wanted.topk(2).indices)


# An expert's way out.


def plain_way_out(gate_up: Tensor, weight: Tensor, ends: Tensor, activation: str, weights: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    inner = ACTIVATIONS[activation](gate) * up * weights
    starts = [0, *ends.tolist()]
    rows = [
        inner[first:last] @ matrix.T for first, last, matrix in zip(starts, starts[1:], weight, strict=False)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_the_way_out_differentiates_as_autograd_does(activation: str) -> None:
    torch.manual_seed(0)
    gate_up, weight = torch.randn(10, 16).double(), torch.randn(4, 24, 8).double()
    weights, ends = torch.rand(10, 1).double(), torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    given = [one.requires_grad_() for one in (gate_up, weight, weights)]

    def run(made: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        output = made(gate_up, weight, ends, activation, weights)
        return output, *torch.autograd.grad(output.square().sum(), given)

    for one, other in zip(run(way_out), run(plain_way_out), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    plain = gate_up.detach(), weights.detach(), gate_up.detach()[:, :8].contiguous()
    torch.library.opcheck(torch.ops.shoal.gated_gradients.default, (*plain, activation))


def test_a_way_out_without_weights_is_one_with_ones() -> None:
    gate_up, weight = torch.randn(10, 16).bfloat16().requires_grad_(), torch.randn(2, 24, 8).bfloat16()
    ends = torch.tensor([4, 10], dtype=torch.int32)
    plain, ones = (
        way_out(gate_up, weight, ends, "silu", one) for one in (None, torch.ones(10, 1).bfloat16())
    )
    assert torch.equal(plain, ones)
    gradients = [torch.autograd.grad(one.float().square().sum(), gate_up)[0] for one in (plain, ones)]
    assert torch.equal(*gradients)


def test_a_frozen_way_out_has_no_gradient() -> None:
    gate_up, weight = torch.randn(4, 16).requires_grad_(), torch.randn(1, 24, 8)
    way_out(gate_up, weight, torch.tensor([4], dtype=torch.int32), "silu").sum().backward()
    assert gate_up.grad is not None and weight.grad is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("weighted", [True, False])
def test_kernels_of_a_gpu_give_what_torch_does(weighted: bool) -> None:
    gate_up, gradient = (torch.randn(77, width, device="cuda") for width in (2 * 104, 104))
    weights = torch.rand(77, 1, device="cuda") if weighted else None
    found = gated_gradients(gate_up, weights, gradient, "silu")
    wide = gate_up.double(), None if weights is None else weights.double(), gradient.double()
    for one, other in zip(found, gated_gradients(*wide, "silu"), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    order = by_expert(torch.randint(0, 5, (77 * 3,), device="cuda"), 5).first(77 * 3 - 11)
    spread = spread_rows(gradient, order.place, order.back, 3)
    assert torch.equal(spread, gradient.index_select(0, order.place // 3))
