"""Pipeline stages: where a model is cut, and which rank holds which stage."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from shoal.facts.layout import ONE_CHUNK, SCHEDULES, V_SHAPED
from shoal.facts.model import Model
from shoal.facts.model.parameters import block_parameters, expert_parameters
from shoal.facts.problem import BadInput, did_you_mean


@dataclass(frozen=True)
class Stage:
    """A contiguous range of layers."""

    index: int
    layers: range
    first: bool  # holds the embedding
    last: bool  # holds the final norm and the head


def cut(model: Model, count: int, seq: int | None = 4096) -> list[Stage]:
    """Cut the layers into ``count`` stages of at least one layer each, minimising the cost of the most expensive
    stage.

    A pipeline runs at the pace of its slowest stage. Among the optimal cuts, the most even one is taken (least sum
    of squared costs), and among those the one whose early stages are shortest, because the first ranks of a
    pipeline hold the most micro-batches. ``seq`` is the sequence length: the longer it is, the more attention
    weighs relative to the head. None cuts by number of layers alone, as some other stacks do.
    """
    if not 1 <= count <= model.layers:
        what = f"{count} pipeline stages, but {model.name} has {model.layers} layers: every stage needs one"
        raise BadInput(what, f"pp·chunks from 1 to {model.layers}")
    if seq is None:
        return _numbered([model.layers * index // count for index in range(count + 1)])
    costs = [layer_cost(model, layer, seq) for layer in range(model.layers)]
    # The embedding always goes with the first layer and the head with the last, since every stage has a layer.
    costs[0] += embedding_cost(model, seq)
    costs[-1] += head_cost(model, seq)
    return cut_costs(costs, count)


def cut_costs(costs: list[int], count: int) -> list[Stage]:
    """The same cut for given layer costs; the ends of the network are already added to the first and last layer."""
    return _numbered(_even_bounds(costs, count, _least_bottleneck(costs, count)))


def _numbered(bounds: list[int]) -> list[Stage]:
    last = len(bounds) - 2
    return [
        Stage(index, range(start, end), first=index == 0, last=index == last)
        for index, (start, end) in enumerate(pairwise(bounds))
    ]


# Forward FLOPs of one sequence, as integers so that equal stages compare equal. The backward pass costs twice as
# much everywhere, which changes no comparison.


def layer_cost(model: Model, layer: int, seq: int) -> int:
    """FLOPs of one layer: its matrix products, and attention as far as its window reaches."""
    reach = min(model.layer_window(layer) or seq, seq)
    # The first ``reach`` tokens see 1, 2, … reach positions; all later ones see ``reach``.
    seen = reach * (reach + 1) // 2 + (seq - reach) * reach
    if model.latent is not None:
        width = model.latent.nope_dim + model.latent.rope_dim + model.latent.value_dim
    else:
        width = 2 * model.head_dim
    return 2 * seq * _matrix_parameters(model, model.has_experts(layer)) + 2 * seen * model.heads * width


def embedding_cost(model: Model, seq: int) -> int:
    """The lookup has no FLOPs; the row that every token reads is counted as one product with a vector."""
    return 2 * seq * model.hidden


def head_cost(model: Model, seq: int) -> int:
    return 2 * seq * model.vocab * model.hidden


@lru_cache(maxsize=64)
def _matrix_parameters(model: Model, with_experts: bool) -> int:
    """Weights of one layer that multiply a token; of the routed experts, only the active ones."""
    matrices = [one for one in block_parameters(model, with_experts) if len(one.shape) == 2]
    routed = model.experts.active if model.experts and with_experts else 0
    return sum(one.size for one in matrices) + routed * sum(one.size for one in expert_parameters(model))


def _least_bottleneck(costs: list[int], count: int) -> int:
    """The least bottleneck cost with which ``count`` contiguous pieces cover all layers, found by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if _pieces_under(costs, limit) <= count:
            high = limit
        else:
            low = limit + 1
    return low


def _pieces_under(costs: list[int], limit: int) -> int:
    """The fewest pieces within ``limit``, filled greedily. Splitting a piece further never raises the bottleneck."""
    pieces, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            pieces, filled = pieces + 1, 0
        filled += cost
    return pieces


def _even_bounds(costs: list[int], count: int, limit: int) -> list[int]:
    """Stage boundaries, the end included, of the most even cut in which no stage costs more than ``limit``."""
    layers = len(costs)
    before = [0, *accumulate(costs)]
    # From the last stage to the first: the least cost of the layers from ``start`` on, and where that cut lies.
    unevenness: list[int | None] = [None] * layers + [0]
    choices: list[list[int]] = []
    for stage in reversed(range(count)):
        best: list[int | None] = [None] * (layers + 1)
        choice = [0] * (layers + 1)
        # Leave at least one layer for each stage before and after this one.
        for start in range(stage, layers - (count - 1 - stage)):
            furthest = bisect_right(before, before[start] + limit) - 1
            for end in range(start + 1, furthest + 1):
                rest = unevenness[end]
                if rest is None:
                    continue
                total = rest + (before[end] - before[start]) ** 2
                known = best[start]
                if known is None or total < known:  # a tie keeps the first, which makes this stage shortest
                    best[start], choice[start] = total, end
        unevenness = best
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds


# Placement of stages on ranks.


def stages_of_rank(pp: int, chunks: int, schedule: str, rank: int) -> list[int]:
    """The stages that one pipeline rank holds, in network order."""
    require_chunks(schedule, chunks)
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + chunk * pp for chunk in range(chunks)]


def rank_of_stage(pp: int, chunks: int, schedule: str, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    require_chunks(schedule, chunks)
    if schedule in V_SHAPED:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def require_chunks(schedule: str, chunks: int) -> None:
    """Raise ``BadInput`` if the schedule does not exist or does not support this many chunks per rank."""
    if schedule not in SCHEDULES:
        raise BadInput(f"unknown pipeline schedule {schedule!r}", did_you_mean(schedule, SCHEDULES))
    if schedule in V_SHAPED and chunks != 2:
        raise BadInput(f"schedule={schedule} has 2 chunks per rank, not {chunks}", "chunks=2")
    if schedule in ONE_CHUNK and chunks != 1:
        raise BadInput(f"schedule={schedule} has 1 chunk per rank, not {chunks}", "chunks=1")
    if chunks < (2 if schedule == "interleaved" else 1):
        raise BadInput(f"schedule={schedule} cannot have {chunks} chunk(s) per rank", "chunks=2")
