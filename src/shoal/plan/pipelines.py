"""The pipelines of one depth as columns: what their ranks compute, and how many micro-batches they hold.

A search bounds thousands of layouts at once (``plan/time_bound.py``, ``plan/memory_bound.py``). Of a pipeline, a
schedule with its chunks, both need a few numbers, which depend on nothing else but how many micro-batches there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.facts.layout import V_SHAPED, Schedule
from shoal.facts.layout.offload_activations import blocks_away
from shoal.facts.layout.stages import Stage
from shoal.facts.model import Model
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.predict.rank_parameters import stages_here
from shoal.predict.time.bubble import idle
from shoal.predict.time.step import stage_kinds

Columns = NDArray[Any]


class Pipelines(NamedTuple):
    """Rows are pipelines. Of kinds of ranks, beside each other: layers without and with experts, whether they have the
    network's first stage and its last, how many they are. Of two ranks, the first and one that puts off the most: the
    same for memory.
    """

    names: tuple[tuple[Schedule, int], ...]
    compiled: NDArray[np.intp]  # 1 where blocks are
    dense: Columns
    sparse: Columns
    first: Columns
    last: Columns
    ranks: Columns
    most: Columns  # layers of the rank that has the most
    held_dense: Columns  # by rank
    held_sparse: Columns
    embedding: Columns
    head: Columns


class Filled(NamedTuple):
    """By the number of micro-batches, then by pipeline."""

    work: Columns  # idle time, as ``predict/time/bubble.py`` has it
    messages: Columns
    # By rank and moment: layers whose activations are held, without experts and with them, where none are offloaded,
    # half of them, all that may be; inputs of stages; layers of which only weight gradients are left to compute;
    # whether gradients are there from before. Not a number: no moment.
    dense: Columns
    sparse: Columns
    half_dense: Columns
    half_sparse: Columns
    rest_dense: Columns
    rest_sparse: Columns
    stages: Columns
    late_dense: Columns
    late_sparse: Columns
    begun: Columns


class PipelineTables:
    """Of one model. What is asked once is kept, by what it depends on: the model's own hash takes a while."""

    def __init__(self, model: Model, seq: int | None) -> None:
        self.model, self.seq = model, seq
        self._blocks: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}
        self._moments: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    def pipelines(
        self, pp: int, names: Sequence[tuple[Schedule, int]], compiled: Sequence[bool]
    ) -> Pipelines:
        model = self.model
        kinds = [stage_kinds(model, pp, chunks, schedule, self.seq) for schedule, chunks in names]
        of_kinds = np.zeros((len(names), max(map(len, kinds)), 5))
        for row, alike in enumerate(kinds):
            for column, kind in enumerate(alike):
                of_kinds[row, column] = kind.dense, kind.sparse, kind.first, kind.last, kind.ranks
        of_ranks = np.zeros((len(names), 2, 4))
        for row, (schedule, chunks) in enumerate(names):
            for column, rank in enumerate(looked_at(schedule, pp)):
                blocks = self.blocks(pp, schedule, chunks, rank)
                last = rank == (0 if schedule in V_SHAPED else pp - 1)
                head = last and not (model.tied and pp == 1)
                layers = [sum(one[kind] for one in blocks) for kind in (0, 1)]
                of_ranks[row, column] = *layers, rank == 0, head
        dense, sparse, first, last_one, ranks = np.moveaxis(of_kinds, -1, 0)
        most = (dense + sparse).max(axis=1)
        on_gpu = np.array(compiled, dtype=np.intp)
        return Pipelines(
            tuple(names), on_gpu, dense, sparse, first, last_one, ranks, most, *np.moveaxis(of_ranks, -1, 0)
        )

    def filled(self, pp: int, names: Sequence[tuple[Schedule, int]], times: Sequence[int]) -> Filled:
        """With so many micro-batches."""
        waits = np.zeros((len(times), len(names), 2))
        held = np.full((len(times), len(names), 2, 2, 10), np.nan)
        for row, count in enumerate(times):
            for column, (schedule, chunks) in enumerate(names):
                waits[row, column] = idle(schedule, pp, chunks, count)
                for rank, number in enumerate(looked_at(schedule, pp)):
                    moments = self.moments(pp, schedule, chunks, number, count)
                    held[row, column, rank, : len(moments)] = moments
        return Filled(*np.moveaxis(waits, -1, 0), *np.moveaxis(held, -1, 0))

    def blocks(self, pp: int, schedule: Schedule, chunks: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Of every chunk of a rank, the layers without experts and with them."""
        key = pp, schedule, chunks, rank
        if key not in self._blocks:
            found = []
            for stage in self._stages(pp, schedule, chunks, rank):
                sparse = sum(self.model.has_experts(number) for number in stage.layers)
                found.append((len(stage.layers) - sparse, sparse))
            self._blocks[key] = tuple(found)
        return self._blocks[key]

    def _stages(self, pp: int, schedule: Schedule, chunks: int, rank: int) -> tuple[Stage, ...]:
        return stages_here(self.model, pp, chunks, schedule, self.seq, rank)

    def moments(
        self, pp: int, schedule: Schedule, chunks: int, rank: int, times: int
    ) -> list[tuple[float, ...]]:
        """As ``Filled`` has them."""
        # Beyond it a pipeline is as full as it gets, but for gpipe's.
        times = times if schedule == "gpipe" else min(times, 2 * pp)
        key = pp, schedule, chunks, rank, times
        known = self._moments.get(key)
        if known is None:
            blocks, known = self.blocks(pp, schedule, chunks, rank), []
            ends = [(stage.first, stage.last) for stage in self._stages(pp, schedule, chunks, rank)]
            for kept, put_off, begun in _fullest(schedule, chunks, pp, times, rank):
                held = [0.0] * 6
                for (dense, sparse), end, count in zip(blocks, ends, kept, strict=True):
                    for place, fraction in enumerate((0.0, 0.5, 1.0)):
                        away = len(blocks_away(dense + sparse, fraction, *end)) if fraction else 0
                        # Which kind stays is not looked at.
                        held[2 * place] += count * max(0, dense - away)
                        held[2 * place + 1] += count * max(0, sparse - away)
                late = [
                    float(sum(one[kind] * count for one, count in zip(blocks, put_off, strict=True)))
                    for kind in (0, 1)
                ]
                # What a stage sends on stays with it; the last stage sends nothing.
                stages = sum(kept) - (kept[-1] if schedule in V_SHAPED or rank else 0)
                known.append((*held, float(stages * (pp > 1)), *late, float(begun)))
            self._moments[key] = known
        return known


def looked_at(schedule: str, pp: int) -> tuple[int, int]:
    """The first rank, and the last one where weight gradients are put off."""
    return (0, pp - 1) if pp > 1 and schedule in SPLIT_BACKWARD else (0, 0)


def _fullest(
    schedule: str, chunks: int, pp: int, times: int, rank: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    """Moments of the first or the last rank: of each chunk, micro-batches that are kept, and of which only weight
    gradients are left to compute; and whether an earlier backward pass has left gradients.

    A schedule holds at least as much at one of its moments (``predict/memory/in_flight.py`` plays them one by one).
    """
    none, reached = (0,) * chunks, min(times, pp)
    if pp == 1:
        yield (1,), none, times > 1
    elif schedule == "gpipe":
        yield (times,), none, False
    elif rank == 0 and schedule in V_SHAPED:
        yield (min(times, 2 * pp - 1), 1), none, times >= 2 * pp
    elif rank == 0:
        first = min(times, 2 * pp - 1) if schedule == "interleaved" else reached
        yield (first, *(reached,) * (chunks - 1)), none, times >= 2 * pp
    elif schedule == "zb":
        # Weights' gradients are put off until as many are waiting: of several chunks, for a whole round.
        begun = times > pp if chunks == 1 else times >= 2 * pp
        yield (*(reached,) * (chunks - 1), 1), (*none[1:], reached - 1), begun
    else:
        yield (reached, reached), none, times > pp
        if schedule == "zbv" and times >= 2 * pp:
            yield (1, 0), (rank, rank), True
