"""Optimizer update memory beyond gradients and states: none where torch's kernels work in place, little with
stochastic rounding."""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.bytes_per_parameter import AVERAGE_BYTES
from shoal.facts.layout.ranks import stride
from shoal.facts.layout.updates import Sharing, UpdatedRange
from shoal.facts.layout.whole_matrices import Matrix, matrices_of, members, part_of, ranges_by_label, rounds
from shoal.facts.optimizers import (
    CODED_BY_CHANCE,
    CODED_BYTES,
    DRAWING_BYTES,
    LION_ELEMENTS,
    ROUNDED_BYTES,
    ROUNDED_ELEMENTS,
    rule_of,
)
from shoal.facts.precision import orthogonal_width, state_width
from shoal.predict.memory.inventory import RankInventory
from shoal.predict.optimizer_matrices import (
    blockwise_bytes,
    largest_part,
    shapes,
    sharing_of,
    state_elements,
)
from shoal.predict.rank_parameters import rank_parameters


def own_states(rank: RankInventory) -> float | None:
    """Bytes of the optimizer's states if they are not uniform per element; None if they are."""
    workload = rank.workload
    if workload.recipe.blockwise and workload.lora is None:
        average = AVERAGE_BYTES * rank.total.trained_share if workload.recipe.ema else 0.0
        return blockwise_bytes(sharing_of(workload), _first(rank)) + average
    if workload.recipe.optimizer not in ("muon", "adafactor") or workload.lora is not None:
        return None
    count = state_elements(sharing_of(workload), _first(rank), workload.recipe.optimizer)
    average = (
        max(4.0, state_width(workload.recipe)) * rank.total.trained_share if workload.recipe.ema else 0.0
    )
    return state_width(workload.recipe) * count + average


def _first(rank: RankInventory) -> int:
    """The first global rank of a stage, which has the larger part of an uneven split."""
    return rank.number * stride("pp", rank.workload.layout)


def passing(rank: RankInventory) -> float:
    """Peak bytes of temporaries during the update."""
    workload = rank.workload
    recipe = workload.recipe
    in_place = recipe.optimizer in ("adamw", "sgd") and not (recipe.rounds_by_chance or recipe.blockwise)
    if workload.lora is not None or in_place:
        return 0.0
    largest = largest_part(sharing_of(workload), _first(rank))
    at_once = min(largest, ROUNDED_ELEMENTS)
    if recipe.blockwise:
        return (CODED_BYTES + CODED_BY_CHANCE * recipe.rounds_by_chance) * at_once
    if recipe.optimizer in ("adamw", "sgd"):
        return ROUNDED_BYTES * at_once
    drawing = DRAWING_BYTES * at_once if recipe.rounds_by_chance else 0.0
    width = max(4.0, state_width(recipe))
    # Clipping adds one gradient copy; fp64 gradients are clipped in place.
    clipped = 1 if recipe.clip and recipe.precision != "fp64" else 0
    if recipe.optimizer == "lion":
        # Narrow states and gradients also exist in fp32.
        copies = 4 if state_width(recipe) < width else 2 + clipped
        moving = width * min(largest, LION_ELEMENTS)
        return max(copies * moving, 2 * moving + drawing)
    if recipe.optimizer == "adafactor":
        here = rank_parameters(workload.layout, workload.model, workload.cut_by, rank.number)
        sums = sum(
            times * (sum(shape) + 2 if len(shape) > 1 else 2)
            for shape, times in shapes(workload, here).items()
        )
        return width * sums + max(width * (3 + clipped) * largest, width * largest + drawing)
    width_of_matrix = orthogonal_width(recipe)
    orthogonalised = _orthogonalised(
        sharing_of(workload),
        _first(rank),
        (2 + clipped) * width,
        width_of_matrix,
        2 * width + width_of_matrix,
    )
    return max(orthogonalised, (width + width_of_matrix) * largest + drawing) if drawing else orthogonalised


@lru_cache(maxsize=4096)
def _orthogonalised(sharing: Sharing, rank: int, given: float, width: int, taken: float) -> float:
    """The peak of Muon's rounds: as a rank's parts are computed, assembled, orthogonalised, or applied.

    ``given`` and ``taken``: bytes per element of a part during the first and the last of these. Orthogonalising a
    matrix holds it as received, as it is and as it will be, plus two squares of its shorter side.
    """
    chosen = matrices_of(sharing, rank, lambda name, size: rule_of("muon", name, size) == "muon")
    own, together = ranges_by_label(sharing, rank), members(sharing, rank)
    mine, worst = together.index(rank), 0.0
    for dealt in rounds(chosen, len(together)):
        before = 0
        sizes = [_updated(own, matrix) for matrix in dealt]
        for size in sizes:
            worst = max(worst, before * width + given * size)
            before += size
        if len(together) > 1:
            others = before - min(size for size in sizes)
            worst = max(worst, 2 * before * width, others * width + taken * max(sizes))
        else:
            worst = max(worst, taken * max(sizes))
        if mine < len(dealt):
            matrix = dealt[mine]
            worst = max(worst, width * (3 * matrix.size + 2 * min(matrix.shape) ** 2))
    return worst


def _updated(own: dict[str, UpdatedRange], matrix: Matrix) -> int:
    one = own.get(matrix.label)
    part = None if one is None else part_of(one, matrix)
    return 0 if part is None else part.size
