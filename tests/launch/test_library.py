"""``shoal.run`` under torchrun and ``shoal.launch`` from Python and from a notebook's function."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.docs.shown import words_of
from torch import nn
from torch.distributed import TCPStore

import shoal

SCRIPT = """
import sys
import torch
import shoal

with shoal.run("fsdp=2", dir=sys.argv[1], batch=4) as run:
    torch.manual_seed(run.rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model, optimizer, loader = run.prepare(model, torch.optim.AdamW(model.parameters()), torch.randn(8, 4).split(1))
    for batch in run.steps(loader, total=run.done + 2):
        loss = run.step(model, batch, loss=lambda model, batch: model(batch).square().mean())
    run.save()
    print(f"rank {run.rank} of {run.world} at step {run.done}", flush=True)
"""


def mean_over_ranks(run: shoal.Run, offset: float) -> tuple[int, str, float]:
    """Importable: started in fresh processes."""
    return run.rank, str(run.layout), run.mean(run.rank + offset)


def train_tiny() -> list[float]:
    """Its own ``shoal.run`` has the layout that it was launched with."""
    with shoal.run(batch=4) as run:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        data = list(torch.arange(32.0).view(8, 4) / 10)
        model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
        return [
            float(run.step(model, batch, loss=lambda model, batch: model(batch).square().mean()))
            for batch in run.steps(loader)
        ]


@pytest.mark.long
def test_ranks_of_torchrun_are_adopted_and_a_second_start_continues(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for step in (2, 4):
        typed = words_of("docs/library.md", "torchrun")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *typed[1:]]
        found = subprocess.run(
            [*command, str(tmp_path / "run")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert found.returncode == 0, found.stderr[-3000:]
        for rank in range(2):
            assert f"rank {rank} of 2 at step {step}" in found.stdout
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert manifest["step"] == 4
    script.write_text(SCRIPT.replace("fsdp=2", "dp=1"))
    typed = words_of("docs/library.md", "python script.py")
    alone = subprocess.run(
        [sys.executable, *typed[1:], str(tmp_path / "run")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert "rank 0 of 1 at step 6" in alone.stdout, alone.stderr[-3000:]


def test_launch_starts_the_ranks_of_a_layout() -> None:
    assert shoal.launch(mean_over_ranks, "dp=2", 1.0) == [(0, "dp=2", 1.5), (1, "dp=2", 1.5)]


def test_a_function_of_a_notebook_is_launched_and_trains_the_same() -> None:
    alone = train_tiny()

    def in_a_cell() -> list[float]:
        return train_tiny()

    for losses in shoal.launch(in_a_cell, "fsdp=2,zero=1"):
        assert losses == pytest.approx(alone, rel=1e-6)


def test_copies_do_not_tidy_up_what_was_thrown_away_before_them() -> None:
    """A store's server has a thread, which a copy of this process has not: it would be waited for in vain."""

    def collects() -> int:
        return gc.collect()

    gc.collect()
    gc.disable()
    try:
        circle: list[object] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        circle.append(circle)
        del circle
        assert len(shoal.launch(collects, "dp=2", timeout=60.0)) == 2
    finally:
        gc.enable()


def test_a_failing_rank_is_named() -> None:
    def fails(run: shoal.Run) -> None:
        if run.rank == 1:
            raise ValueError("no such tensor")
        run.mean(0.0)

    with pytest.raises(RuntimeError, match=r"rank 1(.|\n)*no such tensor"):
        shoal.launch(fails, "dp=2")


def test_an_option_that_is_not_there() -> None:
    with pytest.raises(shoal.BadInput, match="did you mean 'batch'"):
        shoal.launch(mean_over_ranks, "dp=2", bacth=3)
