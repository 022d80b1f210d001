"""AdamW of our own: narrow gradients, and what its kernel is asked to do, against torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.train import adamw, adamw_kernel
from shoal.train.adamw import AdamW

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = [(33, 7), (64, 64), (5,)]


def in_torch(states: Any, measured: Any, settings: tuple[float, ...], noise: list[int]) -> None:
    """What the kernel computes, in the words of torch."""
    assert not noise  # fp32 needs none
    for one in zip(*states, strict=True):
        one_in_torch(*one, measured, settings)


def one_in_torch(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor,
    measured: tuple[Tensor, Tensor, Tensor],
    settings: tuple[float, ...],
) -> None:
    corrections, scale, refused = measured
    lr, rise1, beta2, rise2, eps, decay = settings
    if refused:
        return
    wide = gradient.float() / scale
    weight -= decay * weight
    mean += (wide - mean) * rise1
    square.mul_(beta2).add_(wide * wide * rise2)
    weight -= lr / corrections[0] * (mean / (square.sqrt() / corrections[1] + eps))
    if copy.data_ptr() != weight.data_ptr():
        copy.copy_(weight)


def groups(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": weights[:2], "weight_decay": 0.1},
        {"params": weights[2:], "weight_decay": 0.0},
    ]


def trained(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], narrow: bool) -> None:
    """Six updates, of which one is refused."""
    generator = torch.Generator().manual_seed(1)
    steered: Any = optimizer
    for number in range(6):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator).bfloat16()
            weight.grad = gradient if narrow else gradient.float()
        steered.found_inf, steered.grad_scale = torch.tensor(float(number == 3)), torch.tensor(1.7)
        optimizer.step()


def made(narrow: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for weight in weights:
        weight.grad_dtype = torch.bfloat16 if narrow else torch.float32
    return weights


@pytest.fixture
def theirs() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    weights = made(narrow=False)
    optimizer = torch.optim.AdamW(groups(weights), fused=True, **SETTINGS)
    trained(optimizer, weights, narrow=False)
    return weights, optimizer


def test_narrow_gradients_are_as_good_as_widened_ones(
    theirs: tuple[list[nn.Parameter], torch.optim.Optimizer],
) -> None:
    ours = made(narrow=True)
    optimizer = AdamW(groups(ours), **SETTINGS)
    assert not optimizer.writes_copies
    trained(optimizer, ours, narrow=True)
    for mine, other in zip(ours, theirs[0], strict=True):
        assert torch.equal(mine, other)
        assert mine.grad is not None and mine.grad.dtype == torch.bfloat16
        assert float(optimizer.state[mine]["step"]) == 5


@pytest.mark.parametrize("narrow", [False, True])
def test_the_kernel_is_given_what_torch_computes_with(
    theirs: tuple[list[nn.Parameter], torch.optim.Optimizer], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Callable[[], Any] = lambda: in_torch  # noqa: E731
    monkeypatch.setattr(adamw_kernel, "kernel", kernel)
    monkeypatch.setattr(adamw, "_in_kernel", lambda weight: True)
    ours = made(narrow)
    working: dict[Tensor, Tensor] = {ours[0]: ours[0].detach().bfloat16()}
    optimizer = AdamW(groups(ours), working, **SETTINGS)
    assert optimizer.writes_copies
    trained(optimizer, ours, narrow)
    for mine, other in zip(ours, theirs[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[mine][kind], theirs[1].state[other][kind], rtol=1e-6, atol=1e-7
            )
        assert float(optimizer.state[mine]["step"]) == 5
    assert torch.equal(working[ours[0]], ours[0].detach().bfloat16())


def test_restored_states_count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint gives every weight a count of its own; an update counts once for all."""
    monkeypatch.setattr(adamw_kernel, "kernel", lambda: in_torch)
    monkeypatch.setattr(adamw, "_in_kernel", lambda weight: True)
    weights = made(narrow=False)
    optimizer = AdamW(groups(weights), **SETTINGS)
    for weight in weights:
        states = {kind: torch.zeros_like(weight, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(7.0), **states}
    trained(optimizer, weights, narrow=False)
    assert {float(optimizer.state[weight]["step"]) for weight in weights} == {12.0}
