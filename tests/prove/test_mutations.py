"""The proof of the proof: strategies that are broken on purpose are found, and named with their file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shoal.facts.layout import Layout
from shoal.facts.layout.ring_blocks import Rectangle
from shoal.facts.layout.stages import Stage
from shoal.parallel import pipeline, recompute, ring, shards, vocabulary
from shoal.parallel.context import SequenceShare
from shoal.parallel.deferred import Deferred
from shoal.parallel.replicate import Replicate
from shoal.parallel.shards import Shard
from shoal.parallel.shared_gradients import SharedGradients
from shoal.parallel.stage_module import MicroBatch
from shoal.parallel.zero import ShardedStates
from shoal.prove.parity import Prover
from shoal.prove.parity_rank import ParityRank, run_parity_rank

# Each patches what it breaks. It runs in a rank's own process, which is thrown away afterwards.


def all_reduce_missing() -> None:
    Replicate._send = lambda self, bucket: None  # type: ignore[method-assign]


def gradient_doubled() -> None:
    land = ShardedStates._land

    def twice(self: ShardedStates) -> None:
        shard = self._flying[0].bucket.shard
        before = shard.clone()
        land(self)
        shard.add_(shard - before)

    ShardedStates._land = twice  # type: ignore[method-assign]


def averaged_instead_of_summed() -> None:
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def stale_parameters() -> None:
    """They follow when they are given their first values, and never again."""
    original = ShardedStates.after_update

    def only_once(self: ShardedStates) -> None:
        if not hasattr(self, "followed"):
            self.followed = True
            original(self)

    ShardedStates.after_update = only_once  # type: ignore[method-assign]


def wrong_stage_order() -> None:
    cut = pipeline.cut

    def swapped(model: Any, count: int, seq: int) -> list[Stage]:
        stages = cut(model, count, seq)
        if count == 1:
            return stages
        turned = [stages[1].layers, stages[0].layers, *(stage.layers for stage in stages[2:])]
        return [Stage(s.index, layers, s.first, s.last) for s, layers in zip(stages, turned, strict=True)]

    pipeline.cut = swapped


def norm_not_summed_over_tp() -> None:
    kind = SharedGradients._kind

    def forgetful(self: SharedGradients, piece: Shard) -> str | None:
        return None if "norm" in piece.name else kind(self, piece)

    SharedGradients._kind = forgetful  # type: ignore[method-assign]


def shared_heads_not_summed() -> None:
    kind = SharedGradients._kind

    def forgetful(self: SharedGradients, piece: Shard) -> str | None:
        return None if kind(self, piece) == "copies" else kind(self, piece)

    SharedGradients._kind = forgetful  # type: ignore[method-assign]


def tied_ends_not_summed() -> None:
    SharedGradients._sum_ends = lambda self, gradients: None  # type: ignore[method-assign]


def weight_gradients_forgotten() -> None:
    Deferred.compute = lambda self, stage, micro: self.heaps.clear()  # type: ignore[method-assign]


def rows_mixed_up_on_the_way() -> None:
    wait = pipeline.Arrival.wait
    pipeline.Arrival.wait = lambda self: wait(self).roll(1, 0)  # type: ignore[method-assign]


def input_detached_in_recompute() -> None:
    checkpointed = recompute._checkpointed

    def detached(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
        run = checkpointed(forward, context)
        return lambda hidden, *others: hidden + run(hidden.detach(), *others) - hidden.detach()

    recompute._checkpointed = detached


def embedding_not_summed_over_vocabulary() -> None:
    vocabulary.VocabularyEmbedding.forward = _own_rows_only  # type: ignore[method-assign]


def _own_rows_only(self: Any, index: Tensor) -> Tensor:
    """Every rank gives what its own rows say, and nobody adds them up."""
    stream = self.stream
    saved, stream.leave = stream.leave, lambda x: stream.local(x) if stream.sp else x
    try:
        return _embedding_forward(self, index)
    finally:
        stream.leave = saved


_embedding_forward = vocabulary.VocabularyEmbedding.forward


def later_pieces_unmasked() -> None:
    """A ring's turns with later ranks' keys see all of them: work is uneven, and some of it looks ahead."""
    rectangles = ring.rectangles

    def unbalanced(ranks: int, index: int, source: int, *others: Any) -> Iterator[Rectangle]:
        for seen in rectangles(ranks, index, source, *others):
            yield seen if seen.masked else seen._replace(begin=0)

    ring.rectangles = unbalanced


def positions_off_by_a_shard() -> None:
    """As if every rank had the first tokens of its rows."""
    of = SequenceShare.of

    def shifted(self: SequenceShare, batch: MicroBatch) -> MicroBatch:
        first = SequenceShare(self.layout, 0)
        return replace(of(self, batch), positions=of(first, batch).positions)

    SequenceShare.of = shifted  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        all_reduce_missing,
        gradient_doubled,
        averaged_instead_of_summed,
        stale_parameters,
        wrong_stage_order,
        norm_not_summed_over_tp,
        shared_heads_not_summed,
        tied_ends_not_summed,
        weight_gradients_forgotten,
        rows_mixed_up_on_the_way,
        input_detached_in_recompute,
        embedding_not_summed_over_vocabulary,
        later_pieces_unmasked,
        positions_off_by_a_shard,
    )
}


def broken(rank: int, world: int, store: dist.Store, script: Any, mutation: str = "") -> ParityRank | None:
    MUTATIONS[mutation]()
    return run_parity_rank(rank, world, store, script)


class Broken:
    """``rehearse`` with one mutation; picklable, as what runs in other processes has to be."""

    def __init__(self, mutation: str) -> None:
        self.mutation = mutation

    def __call__(self, rank: int, world: int, store: dist.Store, script: Any) -> ParityRank | None:
        return broken(rank, world, store, script, self.mutation)


@pytest.mark.parametrize(
    ("mutation", "layout", "strategy", "file", "tensor"),
    [
        (all_reduce_missing, "dp=2", "dp", "parallel/replicate.py", "model.embed_tokens.weight"),
        (gradient_doubled, "fsdp=2,zero=2,tp=2", "fsdp", "parallel/zero.py", "model.embed_tokens.weight"),
        (averaged_instead_of_summed, "fsdp=2", "fsdp", "parallel/shard.py", "model.embed_tokens.weight"),
        (stale_parameters, "fsdp=2,zero=1", "fsdp", "parallel/zero.py", None),
        (wrong_stage_order, "dp=2,pp=2", "pp", "parallel/pipeline.py", None),
        (
            norm_not_summed_over_tp,
            "tp=2",
            "tp",
            "parallel/shared_gradients.py",
            "model.layers.0.input_layernorm.weight",
        ),
        (
            shared_heads_not_summed,
            "tp=4",
            "tp",
            "parallel/shared_gradients.py",
            "model.layers.0.self_attn.k_proj.weight",
        ),
        (tied_ends_not_summed, "pp=2", "pp", "parallel/shared_gradients.py", "model.embed_tokens.weight"),
        pytest.param(
            weight_gradients_forgotten,
            "tp=2,pp=2,schedule=zb",
            "pp",
            "parallel/pipeline.py",
            None,
            marks=pytest.mark.long,
        ),
        (rows_mixed_up_on_the_way, "pp=2,schedule=gpipe", "pp", "parallel/pipeline.py", None),
        (input_detached_in_recompute, "dp=2,recompute=full", "recompute", "parallel/recompute.py", None),
        pytest.param(
            embedding_not_summed_over_vocabulary,
            "fsdp=2,tp=2",
            "tp",
            "parallel/tensor.py",
            None,
            marks=pytest.mark.long,
        ),
        pytest.param(
            later_pieces_unmasked, "fsdp=2,cp=2", "cp", "parallel/ring.py", None, marks=pytest.mark.long
        ),
        (positions_off_by_a_shard, "cp=2,cp_kind=ulysses", "cp", "parallel/ulysses.py", None),
    ],
    ids=list(MUTATIONS),
)
def test_a_broken_strategy_is_caught_and_named(
    make_prover: Callable[..., Prover],
    mutation: Callable[[], None],
    layout: str,
    strategy: str,
    file: str,
    tensor: str | None,
) -> None:
    prover = make_prover("fp64", Broken(mutation.__name__))
    (verdict,) = prover.prove([Layout.parse(layout)]).verdicts
    assert not verdict.ok
    assert (verdict.strategy, verdict.file) == (strategy, file), verdict.reason
    first = verdict.differing[0]
    assert first.amount > 1e-6
    if tensor is not None:
        assert first.tensor == tensor


def copies_counted_twice(rank: int, world: int, store: dist.Store, script: Any) -> ParityRank | None:
    shards.counts = lambda held, mesh: True
    return run_parity_rank(rank, world, store, script)


def test_a_wrong_norm_is_noticed(make_prover: Callable[..., Prover]) -> None:
    """Weights hardly tell: AdamW does not mind how large all gradients are together."""
    (verdict,) = make_prover("fp64", copies_counted_twice).prove([Layout.parse("tp=2")]).verdicts
    assert not verdict.ok and "norm of all gradients" in verdict.reason
    assert (verdict.strategy, verdict.file) == ("tp", "parallel/tensor.py")


def rank_that_raises(rank: int, world: int, store: dist.Store, script: Any) -> ParityRank | None:
    if rank == 1:
        torch.Tensor.backward = None  # type: ignore[method-assign,assignment]
    return run_parity_rank(rank, world, store, script)


def test_a_rank_that_fails_is_named(make_prover: Callable[..., Prover]) -> None:
    (verdict,) = make_prover("fp64", rank_that_raises).prove([Layout.parse("dp=2")]).verdicts
    assert not verdict.ok and "rank 1" in verdict.reason and verdict.file == "parallel/replicate.py"
