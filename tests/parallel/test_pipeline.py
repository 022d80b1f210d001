"""Messages between stages: none waits behind another channel's, and all are let go as soon as they have arrived."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.facts.config import TuneSection
from shoal.facts.layout import SCHEDULES, Layout
from shoal.facts.layout.stages import rank_of_stage
from shoal.facts.model.presets import PRESETS
from shoal.facts.schedules.programs import Action, Instruction
from shoal.models import initial
from shoal.models.decoder import build
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.pipeline import Channels, _apart, _neighbours
from shoal.parallel.stage_module import MicroBatch
from shoal.prove.fake_world import fake_rank

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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", range(2, 10))
def test_in_a_group_no_rank_has_two_neighbours(schedule: str, pp: int) -> None:
    layout = Layout.parse(f"pp={pp},schedule={schedule}")
    kinds = _apart(_neighbours(layout))
    stages = range(pp * layout.chunks)
    for one, other in pairwise(rank_of_stage(pp, layout.chunks, schedule, stage) for stage in stages):
        assert one == other or (min(one, other), max(one, other)) in kinds
    for kind in set(kinds.values()):
        ranks = [rank for pair, its in kinds.items() if its == kind for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(set(kinds.values())) <= 3


@pytest.mark.parametrize(
    "layout", ["pp=2", "pp=3,schedule=interleaved", "pp=4,schedule=interleaved", "pp=4,tp=2"]
)
def test_every_channel_has_a_group_to_itself_and_sends_in_batches(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of a batch, NCCL's group makes a communicator for each pair of ranks, and torch warns of it."""
    batches: list[int] = []
    batch = dist.batch_isend_irecv

    def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
        batches.append(len(messages))
        return batch(messages)

    monkeypatch.setattr(dist, "batch_isend_irecv", counted)
    parsed = Layout.parse(layout)
    peers: dict[tuple[int, str, str], set[int]] = defaultdict(set)
    messages = 0
    for rank in range(parsed.world):
        with (
            fake_rank(parsed, rank, "nccl") as mesh,
            CollectiveCounter(lambda name, _: name, log=True) as counter,
        ):
            channels = Channels(mesh)
            place = mesh.coords["pp"]
            for pair in channels.kinds:
                if place not in pair:
                    continue
                peer = sum(pair) - place
                channels.send(torch.ones(2), Instruction(Action.SEND_FORWARD, 0, 0, peer))
                channels.receive((2,), torch.float32, peer)
            for call in counter.calls:
                assert call.peer is not None
                peers[rank, call.group, call.op].add(call.peer)
            messages += len(counter.calls)
    # One peer for each group and direction, and never both directions in one group.
    assert all(len(found) == 1 for found in peers.values())
    assert len({(rank, group) for rank, group, _ in peers}) == len(peers)
    assert messages > 0 and batches == [1] * messages
