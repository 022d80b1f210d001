"""The host's AdamW in one pass: torch's numbers, the same bits however a weight is cut, and machines without it."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.train import host_adamw
from shoal.train.host_adamw import adamw_, settings_of, takes

GROUP: dict[str, Any] = {"betas": (0.9, 0.95), "lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}
THREADS = 2

needs_compiler = pytest.mark.skipif(host_adamw.problem() is not None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("weight_dtype", "gradient_dtype", "narrow_dtype"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("length", [1, 1000, 77777])
def test_it_is_torchs_update(
    weight_dtype: torch.dtype, gradient_dtype: torch.dtype, narrow_dtype: torch.dtype, length: int
) -> None:
    assert takes(weight_dtype, gradient_dtype, narrow_dtype)
    torch.manual_seed(0)
    weight = torch.randn(length, dtype=weight_dtype)
    expected = nn.Parameter(weight.double())
    oracle = torch.optim.AdamW([expected], foreach=False, **GROUP)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for number in range(1, 4):
        gradient = torch.randn(length, dtype=weight_dtype).to(gradient_dtype)
        expected.grad = gradient.double() / 1.7
        oracle.step()
        in_place = gradient_dtype == narrow_dtype
        narrow = gradient if in_place else torch.empty(length, dtype=narrow_dtype)
        adamw_(weight, mean, square, gradient, narrow, settings_of(GROUP, number, 1.7), THREADS)
        assert torch.equal(narrow, weight.to(narrow_dtype))
    # Decay and step round a weight by half of its last bit each; the step itself is a few operations long.
    exact = 1e-14 if weight_dtype == torch.float64 else 3 * 2**-23
    assert torch.allclose(weight.double(), expected, rtol=exact, atol=4 * GROUP["lr"] * exact)
    assert torch.allclose(square.double(), oracle.state[expected]["exp_avg_sq"], rtol=2 * exact, atol=0)


@needs_compiler
def test_bits_do_not_depend_on_how_a_weight_is_cut() -> None:
    torch.manual_seed(0)
    weight, gradient = torch.randn(40_000), torch.randn(40_000).bfloat16()

    def updated(cuts: list[int]) -> list[torch.Tensor]:
        states = [weight.clone(), torch.zeros(40_000), torch.zeros(40_000)]
        read = gradient.clone()
        for start, stop in zip([0, *cuts], [*cuts, 40_000], strict=True):
            part = slice(start, stop)
            mine = [one[part] for one in (*states, read)]
            adamw_(*mine, mine[-1], settings_of(GROUP, 3, 1.0), THREADS)
        return [*states, read]

    whole = updated([])
    for cuts in ([1], [3, 17, 16_391], [19_999]):
        assert all(map(torch.equal, updated(cuts), whole))


@needs_compiler
def test_what_is_no_number_stays_none() -> None:
    weight = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    narrow = torch.zeros(4, dtype=torch.bfloat16)
    states = torch.zeros(4), torch.zeros(4)
    adamw_(weight, *states, torch.zeros(4), narrow, settings_of({**GROUP, "weight_decay": 0.0}, 1, 1.0), 1)
    assert torch.equal(narrow.float().nan_to_num(7.0), weight.bfloat16().float().nan_to_num(7.0))


@needs_compiler
def test_python_goes_on_meanwhile() -> None:
    """A forward pass is issued while the host updates: the kernel must not hold Python's lock."""
    length, beats, over = 1 << 22, 0, threading.Event()
    states = [torch.randn(length), *(torch.zeros(length) for _ in range(3))]

    def update() -> None:
        for _ in range(20):
            adamw_(*states, states[-1], settings_of(GROUP, 1, 1.0), 1)
        over.set()

    thread = threading.Thread(target=update)
    thread.start()
    while not over.is_set():
        beats += 1
        over.wait(0.0005)
    thread.join()
    # With the lock held it would come to its turn between two calls at most.
    assert beats > 60


def test_other_formats_are_not_taken() -> None:
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    assert not takes(bf16, bf16, bf16)
    assert not takes(fp32, bf16, fp32)
    assert not takes(fp64, fp32, fp64)
    assert not takes(fp32, torch.float16, torch.float16)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host_adamw._library.cache_clear()
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as without:
        without.setattr(host_adamw.shutil, "which", lambda _: None)
        assert host_adamw.problem() == "the host's AdamW needs a C++ compiler, such as g++"
    with monkeypatch.context() as broken:

        def fail(command: list[str], **_: object) -> None:
            raise subprocess.CalledProcessError(1, command, stderr="fatal error: no room left\nmore")

        broken.setattr(host_adamw.shutil, "which", lambda name: name or None)
        broken.setattr(host_adamw.subprocess, "run", fail)
        found = host_adamw.problem()
    assert found == "the host's AdamW could not be compiled: fatal error: no room left"
    assert not list(tmp_path.rglob("*.so"))
    host_adamw._library.cache_clear()
