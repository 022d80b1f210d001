"""One kernel for a chunk's loss and gradients: against the two operators it stands in for, and where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from shoal.models import logits as operators
from shoal.models import loss_kernel

# In a process of its own: Triton reads the variable when it is imported.
AGAINST_OPERATORS = """
import torch
from shoal.facts.targets import IGNORE
from shoal.models.logits import logits_to_gradients_, token_statistics
from shoal.models.loss_kernel import kernel

torch.manual_seed(0)
whole = kernel()
for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
    for z in (0.0, 1e-3):
        for columns in (37, 1000, 1024):
            logits, targets = (3 * torch.randn(7, columns)).to(dtype), torch.randint(columns, (7,))
            targets[2] = IGNORE
            found = token_statistics(logits, targets, 0)
            normaliser = found[1].log() + found[0]
            expected = logits.clone()
            logits_to_gradients_(expected, targets, 0, normaliser, torch.full_like(normaliser, 0.25), z)
            sums, of_target = whole(logits, targets, 0.25, z, block=256, warps=4)
            assert torch.allclose(sums, normaliser, rtol=1e-6)
            assert torch.equal(of_target, found[2])
            assert torch.allclose(logits, expected, rtol=close, atol=close / 100)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here: it comes with torch for GPUs")
def test_it_gives_what_the_operators_give() -> None:
    """In Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", AGAINST_OPERATORS], env=environment, check=True)


def test_a_kernel_that_cannot_be_compiled_is_tried_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def broken(*arguments: object) -> tuple[Tensor, Tensor]:
        tried.append(arguments)
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(loss_kernel, "kernel", lambda: broken)
    monkeypatch.setattr(operators, "at_once", lambda gpu, capped: True)
    monkeypatch.setattr(operators, "_NOT_COMPILED", set())
    logits, targets = torch.randn(3, 5), torch.tensor([1, 2, 3])
    before = logits.clone()
    for _ in range(2):
        assert operators.gradients_in_one_kernel_(logits, targets, 1.0, 0.0, None) is None
    assert len(tried) == 1 and torch.equal(logits, before)
    said = capsys.readouterr().out
    assert said == "the loss runs without kernels of its own, which is slower: no C compiler\n"


def test_a_cpu_has_none() -> None:
    assert (
        operators.gradients_in_one_kernel_(torch.randn(3, 5), torch.zeros(3).long(), 1.0, 0.0, None) is None
    )
