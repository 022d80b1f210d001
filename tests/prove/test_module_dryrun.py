"""A dry run of a module that Shoal did not build, against real ranks."""

from __future__ import annotations

import pytest
import torch
from tests.prove.test_module_parity import Taught, batches
from tests.ranks import run_ranks

import shoal
from shoal.facts.problem import BadInput
from shoal.facts.traffic import Traffic
from shoal.observe.collectives import CollectiveCounter

LAYOUTS = ("tp=2,micro=2", "fsdp=2,micro=1", "dp=2", "fsdp=2,zero=1", "pp=2,micro=1")


def count_real(rank: int, world: int) -> list[list[Traffic]]:
    found = []
    for layout in LAYOUTS:
        with shoal.run(layout) as run:
            model = Taught()
            model, _ = run.prepare(model, torch.optim.AdamW(model.parameters()))
            tokens, scale = batches()[0]
            ranks, index = run.layout.data_ranks, run.mesh.data_index
            rows = tokens.chunk(ranks)[index], scale.chunk(ranks)[index]
            run.step(model, rows)
            with CollectiveCounter(run.mesh.names, run.mesh.purposes) as counter:
                run.step(model, rows)
            found.append(counter.traffic())
    return found


def test_collectives_are_those_of_real_ranks() -> None:
    for rank, counted in enumerate(run_ranks(2, count_real)):
        for layout, real in zip(LAYOUTS, counted, strict=True):
            if rank and "pp" not in layout:
                continue  # there ranks do the same
            seen = shoal.dryrun(Taught, batches()[0], layout, rank=rank)
            assert seen.traffic == real and real, layout


def test_memory_is_what_the_layout_holds() -> None:
    """Of 4-byte parameters and AdamW: a rank's share of each, in a world that this machine does not have."""
    size = 4 * sum(one.numel() for one in Taught().parameters())
    whole, sharded = (shoal.dryrun(Taught, batches()[0], layout) for layout in ("dp=4", "dp=1,fsdp=4"))
    assert whole.memory["params"] == size and whole.memory["grads"] >= size
    assert whole.memory["optimizer"] == pytest.approx(2 * size, rel=0.05)
    assert sharded.memory["optimizer"] == pytest.approx(size / 2, rel=0.2)
    assert sharded.peak < whole.peak and sharded.world == 4
    away = shoal.dryrun(Taught, batches()[0], "dp=4,offload=optimizer")
    assert not away.memory.get("optimizer") and away.memory["params"] == size
    # A copy, where its gradient waits, two moments; and a number a parameter.
    assert away.host == pytest.approx(4 * size, rel=0.05) and whole.host == 0
    assert away.peak < whole.peak - 1.5 * size


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="rank=0 to 1"):
        shoal.dryrun(Taught, batches()[0], "tp=2", rank=2)
