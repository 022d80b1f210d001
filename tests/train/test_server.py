"""A parameter server: synchronous, it is the run that dp makes; asynchronous, within its bound; workers come and go."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Run, Train, after_steps

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.plan.resolve import resolve
from shoal.train.files import read_rows

FP64 = {"recipe__precision": "fp64", "recipe__states": "fp32"}


def same(one: Run, other: Run, within: float) -> None:
    assert [row["step"] for row in one.rows] == [row["step"] for row in other.rows]
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        for name in ("loss", "grad_norm", "lr", "targets", "heldout_loss"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=within), (mine["step"], name)
    first, second = one.checkpoint(), other.checkpoint()
    keys = {(piece.state, piece.tensor) for piece in first.manifest.pieces}
    assert keys == {(piece.state, piece.tensor) for piece in second.manifest.pieces}
    assert {state for state, _ in keys} == {"weight", "exp_avg", "exp_avg_sq"}
    for state, name in keys:
        mine, theirs = first.tensor(state, name), second.tensor(state, name)
        scale = float(theirs.abs().max()) or 1.0
        assert float((mine - theirs).abs().max()) / scale <= within, (state, name)


@pytest.mark.parametrize("servers", [1, 2])
def test_synchronous_mode_is_dp(train: Train, servers: int) -> None:
    plain = train("plain", "dp=2", **FP64)
    served = train(f"served-{servers}", "dp=2", server__servers=servers, **FP64)
    assert served.report.code == 0, served.report.message
    same(served, plain, 1e-12)
    for row in served.rows:
        assert sorted(row["workers"]) == [0, 1] or set(row["workers"]) <= {0, 1}
        assert row["staleness"] == [0, 0] and row["world"] == 2 and row["layout"] == "dp=2"
