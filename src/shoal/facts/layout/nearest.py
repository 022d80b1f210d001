"""The legal layouts nearest to an illegal one.

The distance is the sum of |log2(new degree / old degree)| over all degrees: doubling or halving a degree costs 1.
Ties are broken by fewer changed policies, then by keeping the world size, then by fewer changed degrees.

The legality rules judge every candidate. This module only keeps candidates few: each degree must be legal by
itself, the degrees must multiply to a world size that the cluster accepts, and only the nearest combinations are
tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import nsmallest
from itertools import groupby, islice, product
from math import log2
from typing import Any, NamedTuple

from shoal.facts.cluster import Cluster
from shoal.facts.layout import DEFAULT_CHUNKS, DEGREES, Layout, divisors
from shoal.facts.layout.legality import Case, broken, nearest_divisor, nearest_first, violations, worlds
from shoal.facts.model import Model
from shoal.facts.problem import Problem
from shoal.facts.recipe import Recipe

NAMED = 3
# Values kept per degree where the world size is free. Three would do if degrees were independent, but experts and
# data are not.
FEW = 5
# Combinations whose policies are tried: bounds the time spent if nothing is legal.
MOST_TRIED = 200

POLICIES = tuple(key for key in Layout.model_fields if key not in DEGREES)
# Rules that one degree breaks and other degrees can satisfy.
RULES_OF_SEVERAL = {"world", "expert ranks"}

# Whether a layout may be suggested; filters what no rule forbids, such as layouts the engine does not run yet.
Wanted = Callable[[Layout], bool]


def everything(layout: Layout) -> bool:
    return True


def problems(
    layout: Layout,
    model: Model,
    recipe: Recipe,
    cluster: Cluster | None = None,
    strict: bool = False,
    wanted: Wanted = everything,
) -> list[Problem]:
    """Every violated rule with its fix, as in ``legality.violations``, followed by the nearest legal layouts."""
    found = violations(layout, model, recipe, cluster, strict)
    near = nearest_layouts(layout, model, recipe, cluster, strict, wanted) if found else []
    if near:
        named = "; ".join(str(legal) for legal in near)
        found.append(Problem(f"layout {layout} is not legal here", f"nearest legal layouts: {named}"))
    return found


def nearest_layouts(
    layout: Layout,
    model: Model,
    recipe: Recipe,
    cluster: Cluster | None = None,
    strict: bool = False,
    wanted: Wanted = everything,
) -> list[Layout]:
    """Up to three legal layouts, nearest first; none if only a change of the recipe would help."""
    asked = Case.of(layout, model, recipe, cluster, strict)
    if not _legal_alone(asked, Layout(), wanted):
        return []
    near: list[Layout] = []
    old = tuple(layout.degrees.values())
    candidates = nsmallest(
        MOST_TRIED, Candidates(asked, wanted), key=lambda pair: (pair[0], *_order(old, pair[1]))
    )
    for _, equally_far in groupby(candidates, key=lambda pair: pair[0]):
        legal = [found for _, degrees in equally_far if (found := _with_policies(asked, degrees, wanted))]
        near += sorted(legal, key=lambda other: _changes(layout, other))
        if len(near) >= NAMED:
            break
    return near[:NAMED]


def _steps(old: int, new: int) -> float:
    return abs(log2(new / old))


def _sum(distances: Iterable[float]) -> float:
    return round(sum(distances), 9)  # equal distances compare equal


def _changes(asked: Layout, other: Layout) -> tuple[Any, ...]:
    """The sort key among equally distant layouts."""
    policies = sum(getattr(asked, policy) != getattr(other, policy) for policy in POLICIES)
    return policies, asked.world != other.world, *_order(asked.degrees.values(), other.degrees.values())


def _order(old: Iterable[int], new: Iterable[int]) -> tuple[int, ...]:
    """Prefer fewer changed degrees, then changes to simpler strategies."""
    new = tuple(new)
    return sum(before != after for before, after in zip(old, new, strict=True)), *(-degree for degree in new)


def _legal_alone(asked: Case, layout: Layout, wanted: Wanted) -> bool:
    """Whether the one degree set here is legal by itself, whatever the others are."""
    rules = {violation.rule for violation in broken(replace(asked, layout=layout))}
    return rules <= RULES_OF_SEVERAL and wanted(layout)


# Degrees.


class Degrees(NamedTuple):
    """The degrees of a layout, in its field order."""

    dp: int
    fsdp: int
    tp: int
    cp: int
    pp: int
    ep: int


class Candidates:
    """Combinations of degrees that may be legal, each with its distance from the requested layout."""

    def __init__(self, asked: Case, wanted: Wanted) -> None:
        self.asked = asked
        self.wanted = wanted
        self.worlds = worlds(asked.cluster)
        self.data_ranks = divisors(asked.batch)

    def __iter__(self) -> Iterator[tuple[float, Degrees]]:
        model = self.asked.model
        tensor = self._values("tp", divisors(model.heads), {"sp": False})
        context = self._values("cp", divisors(self.asked.seq), {"cp_kind": "ring"}, {"cp_kind": "ulysses"})
        pipeline = self._values("pp", range(1, model.layers + 1))
        expert = self._values("ep", divisors(model.experts.count) if model.experts else [1])
        splits: dict[int, list[tuple[float, int, int]]] = {}
        for (to_tp, tp), (to_cp, cp), (to_pp, pp) in product(tensor, context, pipeline):
            others = tp * cp * pp if self.worlds else 1  # irrelevant if any world size will do
            if others not in splits:
                splits[others] = self._splits(others)
            for to_data, dp, fsdp in splits[others]:
                for to_ep, ep in [pair for pair in expert if dp * fsdp * cp % pair[1] == 0][:NAMED]:
                    far = _sum((to_tp, to_cp, to_pp, to_data, to_ep))
                    yield far, Degrees(dp, fsdp, tp, cp, pp, ep)

    def _values(self, axis: str, values: Iterable[int], *policies: dict[str, Any]) -> list[tuple[float, int]]:
        """The values legal by themselves under some of these policies, each with its distance, nearest first."""
        old, taken = getattr(self.asked.layout, axis), self.worlds
        fitting = [value for value in values if taken is None or any(world % value == 0 for world in taken)]
        legal = (
            (far, value)
            for far, value in sorted((_steps(old, value), value) for value in fitting)
            if any(
                _legal_alone(self.asked, Layout(**{axis: value, **policy}), self.wanted)
                for policy in policies or [{}]
            )
        )
        return list(islice(legal, FEW) if taken is None else legal)

    def _splits(self, others: int) -> list[tuple[float, int, int]]:
        """The nearest dp and fsdp for this many ranks on the other axes: the rules depend only on their product."""
        layout, taken = self.asked.layout, self.worlds
        found = [
            (_sum((_steps(layout.dp, dp), _steps(layout.fsdp, ranks // dp))), dp, ranks // dp)
            for ranks in self.data_ranks
            if taken is None or ranks * others in taken
            for dp in self.data_ranks
            if ranks % dp == 0
        ]

        old = (layout.dp, layout.fsdp)
        return nsmallest(FEW, found, key=lambda split: (split[0], *_order(old, split[1:])))


# Policies. Their rules are independent, so they are settled one by one; a policy that breaks no rule is kept.


def _with_policies(asked: Case, degrees: Degrees, wanted: Wanted) -> Layout | None:
    """The legal layout with these degrees whose policies differ least from the requested ones, or None."""

    def faults(layout: Layout) -> int:
        return len(list(broken(replace(asked, layout=layout)))) + (not wanted(layout))

    layout = asked.layout.replace(**degrees._asdict())
    for alternatives in _alternatives(asked, layout):
        if faults(layout) == 0:
            return layout
        layout = min([layout, *(layout.replace(**changes) for changes in alternatives)], key=faults)
    return layout if faults(layout) == 0 else None


def _alternatives(asked: Case, layout: Layout) -> Iterator[list[dict[str, Any]]]:
    """For each policy that a rule may forbid, its other values, nearest first."""
    yield [{"sp": False}]
    yield [{"cp_kind": "ulysses" if layout.cp_kind == "ring" else "ring"}]
    most_chunks = max(1, asked.model.layers // layout.pp)
    chunks = nearest_first(layout.chunks, {DEFAULT_CHUNKS.get(layout.schedule, 1), most_chunks})
    yield [*({"chunks": count} for count in chunks), {"schedule": "1f1b", "chunks": 1}]
    sequences = asked.batch // layout.data_ranks
    yield [{"micro": nearest_divisor(layout.micro or 1, sequences)}, {"micro": asked.rows}]
    yield [{"offload": ()}]
