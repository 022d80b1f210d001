"""Whole matrices for optimizers that need them: how many of each shape, and the parts that one rank updates."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

from shoal.facts.blockwise import moment_bytes
from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import replica_ranks
from shoal.facts.layout.updates import Sharing, UpdatedRange, updated_ranges
from shoal.facts.model.parameters import Parameter, block_parameters, end_parameters, expert_parameters
from shoal.facts.optimizers import FACTORS, Rule, factor_shape, rule_of, states_of
from shoal.facts.precision import gradient_width
from shoal.facts.recipe import frozen_names
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.workload import Workload


def sharing_of(workload: Workload) -> Sharing:
    """The workload's ``Sharing``, with irrelevant layout fields dropped so that equal sharings share a cache entry."""
    layout = workload.layout
    alike = Layout(
        dp=layout.dp,
        fsdp=layout.fsdp,
        zero=layout.zero,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        schedule=layout.schedule,
        chunks=layout.chunks,
        ep=layout.ep,
    )
    bucket_bytes = round(workload.tune.bucket_mb * 2**20)
    recipe = workload.recipe
    return Sharing(
        workload.model,
        alike,
        workload.cut_by,
        gradient_width(recipe),
        bucket_bytes,
        frozen_names(workload.model, recipe),
        recipe.blockwise,
    )


def shapes(workload: Workload, here: RankParameters) -> Counter[tuple[int, ...]]:
    """How many matrices and vectors of each shape a stage has, among the parameters that the optimizer's own rule
    updates.
    """
    model, layout, optimizer = workload.model, workload.layout, workload.recipe.optimizer
    found: Counter[tuple[int, ...]] = Counter()

    def add(parameters: tuple[Parameter, ...], times: int) -> None:
        for one in parameters:
            if rule_of(optimizer, one.name, len(one.shape)) == optimizer:
                found[one.shape] += times

    add(block_parameters(model, False), here.dense)
    add(block_parameters(model, True), here.sparse)
    if model.experts is not None:
        # Muon deals matrices out among the ranks of one replica, which may hold only some sets of experts.
        sets = min(layout.ep, layout.fsdp * layout.cp) if optimizer == "muon" else layout.ep
        add(expert_parameters(model), here.sparse * model.experts.count // layout.ep * sets)
    ends = end_parameters(model)
    add(ends.embedding, int(here.first))
    add(ends.norm, int(here.last))
    add(ends.head, int(bool(here.head.tensors)))
    return found


def ranks_together(workload: Workload) -> int:
    """Number of ranks that together hold one stage."""
    return replica_ranks(workload.layout).size


@lru_cache(maxsize=4096)
def state_elements(sharing: Sharing, rank: int, optimizer: Rule) -> int:
    """Elements of all optimizer states of a rank."""
    return sum(_kept(one, optimizer) for one in updated_ranges(sharing, rank))


@lru_cache(maxsize=4096)
def blockwise_bytes(sharing: Sharing, rank: int) -> int:
    """Bytes of AdamW's two 8-bit moments for everything that a rank updates."""
    return sum(2 * moment_bytes(one.box.whole, one.stop - one.start) for one in updated_ranges(sharing, rank))


def _kept(one: UpdatedRange, optimizer: Rule) -> int:
    whole, size = one.box.whole, one.stop - one.start
    total = 0
    for state in states_of(optimizer, one.name, len(whole)):
        if state in FACTORS:
            matrix = math.prod(one.box.shape[-2:])
            touched = -(-one.stop // matrix) - one.start // matrix
            total += touched * factor_shape(whole, state)[-1]
        else:
            total += size
    return total


@lru_cache(maxsize=4096)
def largest_part(sharing: Sharing, rank: int) -> int:
    """Elements of the largest part of a matrix or vector that a rank updates."""
    return max((one.stop - one.start for one in updated_ranges(sharing, rank)), default=0)
