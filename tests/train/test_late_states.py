"""Updates whose states are written beside the next backward pass: to the bit what they are without that."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from tests.train.test_host_update import SEQ, batches, made, overlapped
from torch import Tensor

from shoal.parallel.offload.host_memory import HostThread
from shoal.train import host_adamw
from shoal.train.late_states import LateStates
from shoal.train.step import Step

STEPS = 6


@pytest.fixture(autouse=True)
def slow_threads() -> Iterator[None]:
    """A thread of its own on a CPU too; states take their time, so that the next gradients come before they are
    written."""
    original = host_adamw.adamw_

    def begin(self: HostThread, name: str, *_: Any) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    def slow(*arguments: Any) -> None:
        if arguments[-1] == "states":
            time.sleep(0.004)
        original(*arguments)

    with patch.object(HostThread, "__init__", begin), patch.object(host_adamw, "adamw_", slow):
        yield


def with_share(layout: str, share: float | None, **recipe: Any) -> Step:
    step = made(layout, **{"weight_decay": 0.1, "lr": 1e-2, **recipe})
    assert step.host is not None and step.host.late is not None
    step.host.late.share = share
    return step


def trained(step: Step, settled_after: int = 0, refused: int = 0, spoiled: int = 0) -> list[Any]:
    """Every number of a run that is issued ahead: losses, norms, states, counts. ``settled_after``: a step after which
    states are looked at; ``refused``, ``spoiled``: a step whose norm is too large, or not a number."""
    numbers: list[Any] = []
    issued = None
    first = step.pieces[3].held.parameter
    for number in range(1, STEPS + 1):
        step.refuse_above = lambda number=number: 1e-9 if number == refused else math.inf
        hook = None
        if number == spoiled:
            hook = first.register_hook(lambda gradient: gradient * math.nan)
        before, issued = issued, step.issue(number, batches(step, number), step.recipe.batch * SEQ)
        if hook is not None:
            hook.remove()
        if before is not None:
            numbers += _said(before.read())
        if number == settled_after:
            step.settle()
            numbers += states(step)
    assert issued is not None
    return [*numbers, *_said(issued.read()), *states(step)]


def _said(result: Any) -> list[Any]:
    return [result.loss, result.updated, result.grad_norm if math.isfinite(result.grad_norm) else None]


def states(step: Step) -> list[Tensor | float]:
    found: list[Tensor | float] = []
    for piece in step.pieces:
        kept = step.optimizer.state[piece.tensor]
        found += [piece.tensor.detach().clone(), kept["exp_avg"].clone(), kept["exp_avg_sq"].clone()]
        found.append(float(kept["step"]))
        assert piece.working is None or torch.equal(piece.working, piece.tensor.to(piece.working.dtype))
    return found


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        alike = torch.equal(mine, theirs) if isinstance(theirs, Tensor) else mine == theirs
        assert alike, (mine, theirs)


@pytest.mark.parametrize(
    ("layout", "recipe", "moments"),
    [
        ("offload=optimizer", {"precision": "bf16", "clip": 1e-3}, {}),  # always clipped
        ("offload=optimizer", {"precision": "fp32", "clip": 0.0}, {"settled_after": 3}),
        ("offload=optimizer", {"precision": "bf16", "clip": 3.0}, {"refused": 3}),  # clipped at first
        ("offload=optimizer:0.6", {"precision": "bf16"}, {"spoiled": 4, "settled_after": 4}),
        ("micro=1,offload=optimizer", {"precision": "bf16", "clip": 0.5}, {"settled_after": 2}),
        ("micro=2,offload=params", {"precision": "bf16", "clip": 0.5}, {"refused": 2}),
        ("offload=params:0.5", {"precision": "fp64", "clip": 0.5}, {"spoiled": 2}),
        ("recompute=full,offload=optimizer", {"precision": "fp64"}, {"refused": 1}),
    ],
)
def test_no_bit_depends_on_what_is_late(layout: str, recipe: dict[str, Any], moments: dict[str, int]) -> None:
    plain, some, every = (
        trained(with_share(layout, share, **recipe), **moments) for share in (0.0, 0.4, 1.0)
    )
    assert_alike(some, plain)
    assert_alike(every, plain)


def test_states_are_late_and_gradients_wait_for_them() -> None:
    """The weights are back while states are not written; a gradient of the next step does not come before they are."""
    step = with_share("offload=optimizer", 1.0, precision="bf16")
    assert step.host is not None
    step.issue(1, batches(step, 1), step.recipe.batch * SEQ)
    step.host.wait_for(math.inf)
    piece = step.pieces[0]
    away = step.host.offloaded.away[piece]
    assert away.read is not None and not away.read.is_set()
    assert not torch.equal(piece.working, piece.tensor.to(torch.bfloat16))  # type: ignore[arg-type]
    waiting = away.read
    step.host.offloaded.start_step(1)
    step.host.offloaded.leave(piece, torch.zeros_like(piece.working))  # type: ignore[arg-type]
    assert waiting.is_set()
    assert torch.equal(piece.working, piece.tensor.to(torch.bfloat16))  # type: ignore[arg-type]


def test_an_error_while_states_are_written_holds_nobody_up() -> None:
    step = with_share("offload=optimizer", 1.0, precision="fp32")
    original = host_adamw.adamw_

    def broken(*arguments: Any) -> None:
        if arguments[-1] == "states":
            raise ZeroDivisionError
        original(*arguments)

    with patch.object(host_adamw, "adamw_", broken):
        issued = step.issue(1, batches(step, 1), step.recipe.batch * SEQ)
        with pytest.raises(ZeroDivisionError):
            step.issue(2, batches(step, 2), step.recipe.batch * SEQ)
    with pytest.raises(ZeroDivisionError):
        issued.read()


def _ranks_late(rank: int, world: int, layout: str, share: float) -> list[float]:
    with patch.object(LateStates, "choose", _choose_by(share)):
        return overlapped(rank, world, layout, {})


def _choose_by(share: float) -> Any:
    original = LateStates.choose

    def choose(self: LateStates, micro_batches: int) -> Any:
        self.share = share
        return original(self, micro_batches)

    return choose


@pytest.mark.parametrize("layout", ["fsdp=2", "fsdp=2,zero=2", "fsdp=2,zero=1", "tp=2", "dp=2,micro=1"])
def test_ranks_agree_with_late_states(layout: str) -> None:
    plain, late = (run_ranks(2, _ranks_late, f"{layout},offload=optimizer", share) for share in (0.0, 1.0))
    assert plain == late


@np.errstate(all="ignore")
def plainly(states: list[Tensor], gradient: Tensor, settings: list[float]) -> list[Tensor]:
    """In numpy, which rounds every operation once; torch's square root is not exact."""
    weight, mean, square = (one.numpy() for one in states)
    scale, step_size, correction, rise1, beta2, rise2, eps, decay = map(np.float32, settings)
    found = gradient.float().numpy() / scale
    mean = mean + (found - mean) * rise1
    square = square * beta2 + found * found * rise2
    root = np.sqrt(square) / correction + eps
    new = weight - weight * decay - step_size * (mean / root)
    return [torch.from_numpy(one) for one in (new, mean, square)]


@pytest.mark.parametrize("scale", [1.0, 1.0 + 2.0**-23, 1.7, 1234.5, 2.0 - 2.0**-22, 2.0 - 2.0**-23, 1e30])
@pytest.mark.parametrize("updates", [1, 7, 324, 5000])
def test_quick_divisions_are_exact(scale: float, updates: int) -> None:
    """By numbers that all elements share, to the bit of a division: of the tiniest and the largest, of infinities."""
    torch.manual_seed(updates)
    size = 2**16 + 5
    gradient, mean = (torch.randn(size) * torch.exp2(torch.rand(size) * 60 - 50) for _ in range(2))
    weight, square = torch.randn(size), torch.rand(size) * torch.exp2(torch.rand(size) * 90 - 80)
    gradient[:9] = torch.tensor([0.0, 1e-44, -1e-40, 1e-30, 3e38, -3e38, math.inf, math.nan, 1e-25])
    square[9:13] = torch.tensor([0.0, 3e38, math.inf, 1e-44])
    settings = host_adamw.settings_of(
        {"betas": (0.9, 0.95), "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}, updates, scale
    )
    for narrow in (gradient, gradient.bfloat16()):
        states = [weight.clone(), mean.clone(), square.clone()]
        expected = plainly(states, narrow, settings)
        host_adamw.adamw_(*states, narrow.clone(), torch.empty_like(narrow), settings, 2)
        for mine, theirs in zip(states, expected, strict=True):
            assert torch.equal(mine.nan_to_num(nan=-1.25), theirs.nan_to_num(nan=-1.25))


def test_as_much_is_late_as_was_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before a step was measured; then the first pieces, as many as the shortest time between two steps had
    room for. More micro-batches leave their first one's share of it."""
    step = made("offload=optimizer", precision="bf16")
    late, now = LateStates(step.pieces), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    total = sum(piece.stop - piece.start for piece in step.pieces)
    assert late.choose(1) == frozenset()
    late.written(total, 1.0)
    for window in (4.0, 0.5, 2.0):
        late.weights_returned()
        now[0] += window
        late.norm_known(1)
    chosen = late.choose(1)
    sizes = [piece.stop - piece.start for piece in step.pieces]
    assert chosen == frozenset(step.pieces[: len(chosen)])
    assert sum(sizes[: len(chosen)]) <= 0.5 * 0.85 * total < sum(sizes[: len(chosen) + 1])
    assert late.choose(2) == frozenset()
    late.weights_returned()
    now[0] += 0.5
    late.norm_known(2)
    assert 0 < len(late.choose(2)) < len(chosen)
    late.written(total, 0.1)  # a quicker host
    assert late.choose(1) == frozenset(step.pieces)
