"""Messages between stages are let go as soon as they have arrived, however many micro-batches a step has."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import run_ranks

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.presets import PRESETS
from shoal.models import initial
from shoal.models.decoder import build
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.pipeline import Channels
from shoal.parallel.segment import MicroBatch

MODEL = PRESETS["tiny"].model_copy(update={"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32})


def most_kept(rank: int, world: int, layout: str, micro_batches: int) -> int:
    """The most forward messages that a rank keeps at once."""
    kept = []
    send = Channels.send

    def counted(self: Channels, tensor: torch.Tensor, message: object) -> None:
        send(self, tensor, message)  # type: ignore[arg-type]
        kept.append(sum(key.action == "SF" for key in self._flying))

    Channels.send = counted  # type: ignore[method-assign,assignment]
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    placed = apply(build(MODEL), mesh, TuneSection(), lambda slices: initial.fill(slices, MODEL, 0), 8)
    tokens = torch.arange(8)[None]
    batch = MicroBatch(tokens, tokens, None, tokens, None)
    placed.gradients.start_step()
    placed.executor.forward_backward([batch] * micro_batches, 1.0)
    placed.gradients.finish_step()
    return max(kept, default=0)


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,schedule=zbv"])
def test_messages_kept_do_not_grow_with_the_step(layout: str) -> None:
    few, many = (max(run_ranks(2, most_kept, layout, count)) for count in (6, 16))
    assert few == many <= 5
