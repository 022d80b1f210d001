"""Dry run of a module that Shoal did not build: one rank of a world of any size, on tensors without data.

The module is built, placed and stepped by the code that trains it: its collectives are those of the real run, and its
peak is what the same operators hold. There is no prediction beside them: Shoal does not know the shape of the module.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.facts.layout import Layout
from shoal.facts.ledger import HOST
from shoal.facts.problem import BadInput
from shoal.facts.traffic import Traffic
from shoal.observe.attribution import Attributions
from shoal.observe.collectives import CollectiveCounter
from shoal.observe.memory import MemoryTracker, live_bytes
from shoal.parallel.mesh import Mesh
from shoal.parallel.place_module import PlacedModule
from shoal.prove.fake_world import SumsInPlace, fake_rank, without_data
from shoal.prove.module_parity import own_rows
from shoal.train.library.run import JoinedRanks, Run


@dataclass(frozen=True)
class ModuleDryRun:
    """One rank's step, as it was counted."""

    layout: str
    world: int
    rank: int
    memory: dict[str, int]  # bytes on the device at the peak, by category
    peak: int  # and in all
    host: int  # bytes that wait in the host's memory
    traffic: list[Traffic]
    seconds: float


def dryrun(
    build: Callable[[], nn.Module],
    batch: Any,
    layout: str | Layout,
    *,
    rank: int = 0,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> ModuleDryRun:
    """Run the second step of one rank: the first creates the optimizer's states and FSDP's buffers.

    ``build()`` is called where tensors take no memory. ``batch``: that of a whole step. ``options``: those of
    ``run.prepare``, such as ``plan``.
    """
    wanted = layout if isinstance(layout, Layout) else Layout.parse(layout)
    if not 0 <= rank < wanted.world:
        raise BadInput(
            f"rank={rank}: layout {wanted} has {wanted.world} rank(s)", f"rank=0 to {wanted.world - 1}"
        )
    if dist.is_initialized():
        raise BadInput(
            "a dry run in a process that is a rank already", "shoal.dryrun in a process of its own"
        )
    began = time.perf_counter()
    with fake_rank(wanted, rank, "gloo") as mesh, without_data():
        run = FakeRun(mesh)
        model = build()
        prepared = run.prepare(model, optimizer(model.parameters()), **options)
        rows = own_rows(batch, run, lambda one: torch.zeros(one.shape, dtype=one.dtype))
        run.step(prepared[0], rows, loss=loss)
        gc.collect()
        assert run.placed is not None
        origins = Attributions([run.placed.module], run.placed.gradients.computed_with(), mesh.purposes)
        tracker = MemoryTracker(fake=True, origins=origins)
        with origins, CollectiveCounter(mesh.names, mesh.purposes) as counter, tracker:
            _mark(tracker, run)
            tracker.reset_peak()
            with SumsInPlace():
                run.step(prepared[0], rows, loss=loss)
            _mark(tracker, run)
        held = dict(tracker.peak_by_category())
        host = live_bytes(_waiting(run))
    seconds = time.perf_counter() - began
    return ModuleDryRun(
        str(wanted), wanted.world, rank, held, sum(held.values()), host, counter.traffic(), seconds
    )


class FakeRun(Run):
    """A rank among others that are not there, and that agree with it on everything."""

    def __init__(self, mesh: Mesh) -> None:
        self._given = mesh
        super().__init__(JoinedRanks(mesh.rank, mesh.world, mesh.device, None, 1, _stay), mesh.layout)

    def _join(self, layout: Layout) -> Mesh:
        return self._given

    def _agree(self, placed: PlacedModule) -> tuple[int, list[int]]:
        self.mesh.hosts.sum_integers([0, 0, 0])
        return 1, [1] * len(placed.names)


def _stay() -> None:
    """``fake_rank`` leaves the world."""


def _mark(tracker: MemoryTracker, run: Run) -> None:
    """What cannot be told by where it was made."""
    assert run.placed is not None
    tracker.mark(_waiting(run), HOST)
    tracker.mark((piece.tensor for piece in run.placed.kept), "params")
    for piece, updated in run.updated.items():
        tracker.mark([piece.tensor], "params")
        if updated is piece.tensor:
            tracker.mark(_states(run, updated), "optimizer")
        if piece.tensor.grad is not None:
            tracker.mark([piece.tensor.grad], "grads")


def _waiting(run: Run) -> list[Tensor]:
    """What the host has."""
    found: list[Tensor] = []
    for piece, updated in run.updated.items():
        if updated is not piece.tensor:
            found += [updated, *_states(run, updated)]
    return [*found, *(run.host.gradients.values() if run.host is not None else ())]


def _states(run: Run, updated: Tensor) -> list[Tensor]:
    assert run.optimizer is not None
    return [one for one in run.optimizer.state.get(updated, {}).values() if isinstance(one, Tensor)]
