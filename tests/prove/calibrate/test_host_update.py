"""The host's update that is timed is AdamW: piece by piece the same as torch's own over all of it."""

from __future__ import annotations

import pytest
import torch

from shoal.prove.calibrate.host_update import HostState, bytes_per_second


@pytest.mark.parametrize("problem", [None, "no compiler"])
def test_it_is_adamw_whatever_the_pieces(problem: str | None) -> None:
    state = HostState(1000, 64, threads=2)
    state.problem = state.problem or problem
    torch.manual_seed(0)
    state.master.normal_()
    state.gradient.normal_()
    weight = torch.nn.Parameter(state.master.clone())
    weight.grad = state.gradient.float()
    oracle = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        state.update()
        oracle.step()
    torch.testing.assert_close(state.master, weight.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(state.back, state.master.bfloat16())


def test_more_takes_longer_and_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    assert bytes_per_second(2**18) > 0
    assert torch.get_num_threads() == before
