"""Traffic of optimizers that need whole matrices, between the N ranks that together hold a stage (N > 1).

muon       all-to-all  twice for every N matrices, largest first: parts to the rank that assembles a matrix, and
                       back. The larger of what a rank sends and holds: about a matrix · compute width
adafactor  all-reduce  the row and column sums of all matrices, and of weights; then the sizes of updates;
                       with all replicas of the stage. For a tied embedding also between both ends of a pipeline
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.layout.parameter_groups import replica_ranks, stage_ranks
from shoal.facts.layout.ranks import coordinates
from shoal.facts.layout.whole_matrices import Matrix, matrices_of, members, part_of, ranges_by_label, rounds
from shoal.facts.model.parameters import EMBEDDING, by_name
from shoal.facts.model.tensor_split import tensor_part
from shoal.facts.optimizers import rule_of
from shoal.facts.precision import orthogonal_width
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.optimizer_matrices import ranks_together, shapes, sharing_of
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.workload import Workload


def calls(workload: Workload, here: RankParameters) -> list[CollectiveCall]:
    """Cheap approximation: all matrices of average size."""
    optimizer, group = workload.recipe.optimizer, replica_ranks(workload.layout)
    if optimizer not in ("muon", "adafactor") or group.size == 1 or workload.lora is not None:
        return []
    found = shapes(workload, here)
    if optimizer == "adafactor":
        sums = sum(times * (sum(shape) + 1 if len(shape) > 1 else 1) for shape, times in found.items())
        return _sums(workload, sums, found.total(), here.end)
    elements = sum(times * shape[0] * shape[1] for shape, times in found.items())
    count = -(-found.total() // ranks_together(workload))
    each = elements // found.total() * orthogonal_width(workload.recipe) if found else 0
    return [CollectiveCall("all_to_all", group.name, each, 2 * count, "update")]


def exact(workload: Workload, rank: int) -> list[CollectiveCall]:
    optimizer, group = workload.recipe.optimizer, replica_ranks(workload.layout)
    if optimizer not in ("muon", "adafactor") or group.size == 1:
        return []
    sharing = sharing_of(workload)
    chosen = matrices_of(
        sharing,
        rank,
        lambda name, size: rule_of(optimizer, name, size) == optimizer,
        all_experts=optimizer == "adafactor",
    )
    if optimizer == "adafactor":
        sums = sum(sum(one.shape) + 1 if len(one.shape) > 1 else 1 for one in chosen)
        ends = sum(one.name == EMBEDDING for one in chosen)
        tied = workload.model.tied and workload.layout.pp > 1 and ends == 1
        return _sums(workload, sums, len(chosen), tied)
    return list(_exchanges(workload, rank, chosen))


def _sums(workload: Workload, sums: int, matrices: int, end: bool) -> list[CollectiveCall]:
    """``end``: a tied embedding has its other copy on another rank."""
    model, group = workload.model, stage_ranks(workload.layout).name
    sizes = [(group, sums), (group, matrices)]
    if end:
        sizes += [("pp ends", model.vocab + model.hidden + 1), ("pp ends", 1)]
    width = 8 if workload.recipe.precision == "fp64" else 4
    return [CollectiveCall("all_reduce", name, width * size, 1, "update") for name, size in sizes]


def _exchanges(workload: Workload, rank: int, matrices: list[Matrix]) -> Iterator[CollectiveCall]:
    """Round by round, there and back: the larger of what is sent and what is received."""
    layout, sharing = workload.layout, sharing_of(workload)
    group, together = replica_ranks(layout), members(sharing, rank)
    mine, width, own = together.index(rank), orthogonal_width(workload.recipe), ranges_by_label(sharing, rank)
    tensor, parameters = coordinates(rank, layout)["tp"], by_name(workload.model)
    for dealt in rounds(matrices, len(together)):
        there = back = 0
        for matrix in dealt:
            one = own.get(matrix.label)
            part = None if one is None else part_of(one, matrix)
            if one is not None and part is not None:
                there += part.size if one.part.copy == 0 else 0
                back += part.size
        whole = copies = 0
        if mine < len(dealt):
            whole = dealt[mine].size
            copies = tensor_part(parameters[dealt[mine].name], layout.tp, tensor).copies
        for size in (max(there, whole), max(back, whole * copies)):
            yield CollectiveCall("all_to_all", group.name, size * width, 1, "update")
