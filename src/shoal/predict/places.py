"""What stands on each rank of a pipeline: which blocks, which ends, and how many parameters they have."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from shoal.facts.model import Model
from shoal.facts.parameter_groups import placement
from shoal.facts.schedule import SPLIT_BACKWARD
from shoal.facts.stages import Stage, rank_of_stage, stages_of_rank
from shoal.predict.held import cut_once
from shoal.predict.inflight import bottom
from shoal.predict.question import Question
from shoal.predict.weights import Ends, Part, Split, adapter_key, block, ends


class Run(NamedTuple):
    """Neighbouring blocks of one kind."""

    experts: bool
    window: bool  # shorter than the sequence
    layers: int
    part: Part  # of one of them


class Chunk(NamedTuple):
    """One stage on a rank."""

    first: bool
    last: bool
    runs: tuple[Run, ...]  # in the order of the network
    layers: int
    blocks: Part  # all of them
    ends: Part  # embedding, final norm, head, as far as they are here


class Place(NamedTuple):
    """One rank of the pipeline."""

    chunks: tuple[Chunk, ...]
    total: Part
    ends: Ends


def split_of(question: Question) -> Split:
    layout = question.layout
    dense, routed = (placement(layout.tp, layout.cp, layout.fsdp, layout.dp, ep) for ep in (1, layout.ep))
    return Split(layout.tp, layout.ep, dense.sharded.size, routed.sharded.size)


class Pipeline(NamedTuple):
    """Every rank, and which of them can be the fullest."""

    ranks: tuple[Place, ...]
    fullest: tuple[int, ...]


def places(question: Question) -> Pipeline:
    layout = question.layout
    return pipeline_of(
        question.model,
        split_of(question),
        adapter_key(question.lora),
        (layout.schedule, layout.pp, layout.chunks),
        question.recipe.seq,
        question.stack.even_stages,
    )


@lru_cache(maxsize=4096)
def pipeline_of(
    model: Model,
    split: Split,
    lora: tuple[int, tuple[str, ...]] | None,
    pipeline: tuple[str, int, int],
    seq: int,
    even: bool,
) -> Pipeline:
    schedule, pp, chunks = pipeline
    stages = cut_once(model, pp * chunks, None if even else seq)
    at_the_ends = ends(model, split)
    found = []
    for rank in range(pp):
        here = [
            _chunk(model, split, lora, stages[number], at_the_ends, seq, tied_here=pp == 1)
            for number in stages_of_rank(pp, chunks, schedule, rank)
        ]
        total = _added([part for chunk in here for part in (chunk.blocks, chunk.ends)])
        found.append(Place(tuple(here), total, at_the_ends))
    return Pipeline(
        tuple(found), _fullest(found, rank_of_stage(pp, chunks, schedule, pp * chunks - 1), schedule)
    )


def _fullest(every: list[Place], last: int, schedule: str) -> tuple[int, ...]:
    """The two ends, and of ranks with equal blocks the first, which holds the most micro-batches.

    The first rank is a kind of its own: it receives no activations. So is the bottom of a V, where the two stages of a
    rank send each other nothing. Where the backward pass is split also the last of each kind, which has put off the
    most of it.
    """
    first: dict[tuple[str, tuple[tuple[Run, ...], ...]], int] = {}
    final: dict[tuple[str, tuple[tuple[Run, ...], ...]], int] = {}
    for rank, place in enumerate(every):
        end = "first" if rank == 0 else "bottom" if bottom(schedule, len(every), rank) else ""
        kind = end, tuple(chunk.runs for chunk in place.chunks)
        first.setdefault(kind, rank)
        final[kind] = rank
    late = final.values() if schedule in SPLIT_BACKWARD else ()
    return tuple(sorted({0, last, *first.values(), *late}))


def _chunk(
    model: Model,
    split: Split,
    lora: tuple[int, tuple[str, ...]] | None,
    stage: Stage,
    at_the_ends: Ends,
    seq: int,
    tied_here: bool,
) -> Chunk:
    def kind(layer: int) -> tuple[bool, bool]:
        return model.has_experts(layer), (model.layer_window(layer) or seq) < seq

    runs = [
        Run(*one, len(list(layers)), block(model, one[0], split, lora))
        for one, layers in groupby(stage.layers, key=kind)
    ]
    parts = [at_the_ends.embedding] if stage.first else []
    if stage.last:
        # In a pipeline a tied head is a copy of the embedding.
        parts += [at_the_ends.norm] + ([] if model.tied and tied_here else [at_the_ends.head])
    return Chunk(
        stage.first,
        stage.last,
        tuple(runs),
        len(stage.layers),
        _added([_times(run.part, run.layers) for run in runs]),
        _added(parts),
    )


def _added(parts: list[Part]) -> Part:
    return Part(*(sum(column) for column in zip(*parts, strict=True))) if parts else Part()


def _times(part: Part, count: int) -> Part:
    return Part(*(count * value for value in part))
