"""Lower bounds on data ranks' exchange in a step, with each rank's parameters as one message.

Once states are decided, it is their placement's exchange. Before that, it is the minimum over all placements:
gradients are reduced over all data ranks in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from shoal.facts.layout import Zero, divisors
from shoal.facts.layout.float8 import gathered_width
from shoal.facts.layout.parameter_groups import Placement
from shoal.facts.precision import reduce_width, weight_width
from shoal.plan.space import UNITS, ModelSplit, RankWork, StateSharding, placed
from shoal.predict.rank_parameters import RankParameters, expert_elements
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.step import RankKind

# Without accumulation ZeRO stages 1 and 2 exchange equally much, and stage 2 never less.
ZEROS: tuple[Zero, ...] = (3, 1)


class Exchange(NamedTuple):
    """Seconds of data ranks' exchange in a step, by what it overlaps."""

    forward: float = 0.0  # per micro-batch, overlapping its passes
    backward: float = 0.0
    bare_forward: float = 0.0  # of these, what cannot overlap anything: one block's, per micro-batch
    bare_backward: float = 0.0
    once_forward: float = 0.0  # once per step, overlapping one micro-batch's passes
    once_backward: float = 0.0
    alone: float = 0.0

    def left(self, overlap: float, times: int, forward: float, backward: float) -> float:
        """The exposed exchange over ``times`` micro-batches with passes this long."""
        left = self.alone
        for seconds, bare, beside in (
            (self.forward, self.bare_forward, times * forward),
            (self.backward, self.bare_backward, times * backward),
            (self.once_forward, 0.0, forward),
            (self.once_backward, 0.0, backward),
        ):
            left += seconds - overlap * min(seconds - bare, beside)
        return left


@dataclass(eq=False)
class ExchangeBound:
    """``body``: all layers' parameters, by ``tp`` and ``sp``. ``persists``: whether small units stay gathered.
    ``frozen``: whether weights are frozen, or some of them.
    """

    on: CostModel
    body: Callable[[int, bool], RankParameters]
    persists: bool
    frozen: bool
    _once: dict[tuple[object, ...], float] = field(default_factory=dict)

    def of_states(
        self,
        split: ModelSplit,
        share: RankWork,
        kinds: Iterable[RankKind],
        states: StateSharding,
        times: int,
    ) -> Exchange:
        body = self.body(split.tp, share.sp)
        elements = min(
            kind.dense * body.dense_block.elements
            + kind.sparse * body.sparse_block.elements
            + kind.first * body.embedding.elements
            + kind.last * body.head.elements
            for kind in kinds
        )
        sparse = min(kind.sparse for kind in kinds)
        return self._of(split, share, states, elements, sparse, times)

    def least(
        self,
        split: ModelSplit,
        share: RankWork,
        zeros: tuple[Zero, ...],
        fewest: tuple[int, int],
        times: int,
        forward: float,
        backward: float,
    ) -> float:
        """Exposed seconds, minimised over the ranks that shard states. ``fewest``: layers without and with experts
        that every pipeline rank has. ``forward``, ``backward``: upper bounds on one micro-batch's passes.
        """
        if split.data * split.cp == 1:
            return 0.0
        overlap = self.on.stack.overlap
        if split.pp == 1:
            return min(
                one.left(overlap, times, forward, backward)
                for one in self._ways(split, share, zeros, fewest, times)
            )
        # In a pipeline it all happens once, for any number of micro-batches: sharded gradients cost the same.
        zeros = tuple(zero for zero in zeros if zero != 2 or 1 not in zeros)
        key = split, share.sp, share.ep, zeros
        known = self._once.get(key)
        if known is None:
            found = self._ways(split, share, zeros, fewest, times)
            known = self._once[key] = min(
                (one.once_forward + one.once_backward + one.alone for one in found), default=inf
            )
        return known - overlap * min(known, forward + backward)

    def _ways(
        self,
        split: ModelSplit,
        share: RankWork,
        zeros: tuple[Zero, ...],
        fewest: tuple[int, int],
        times: int,
    ) -> Iterable[Exchange]:
        body = self.body(split.tp, share.sp)
        dense, sparse = fewest
        elements = dense * body.dense_block.elements + sparse * body.sparse_block.elements
        if split.pp == 1:
            elements += body.embedding.elements + body.head.elements
        for fsdp in divisors(split.data):
            for zero in zeros:
                states = StateSharding(split.data // fsdp, fsdp, zero)
                yield self._of(split, share, states, elements, sparse, times)

    def _of(
        self,
        split: ModelSplit,
        share: RankWork,
        states: StateSharding,
        elements: int,
        sparse: int,
        times: int,
    ) -> Exchange:
        """For ``elements`` parameters that all data ranks hold, and for the experts of ``sparse`` layers."""
        body = self.body(split.tp, share.sp)
        passes = 0 if split.pp > 1 else times  # in a pipeline everything is exchanged once per step
        blocks = [one.elements for one in (body.dense_block, body.sparse_block) if one.elements]
        ends = body.embedding.elements + body.head.elements
        found = self._exchanged(elements, placed(split, states), passes, states.zero, ends, min(blocks))
        routed = sparse * expert_elements(self.on.model, split.tp, share.ep)
        if not routed:
            return found
        more = self._exchanged(routed, placed(split, states, share.ep), passes, states.zero)
        return Exchange(*(a + b for a, b in zip(found, more, strict=True)))

    def _exchanged(
        self, elements: int, where: Placement, passes: int, zero: int, ends: int = 0, block: int = 0
    ) -> Exchange:
        """For this many parameters of a rank: one message per kind, ``passes`` times per step; 0: once for all
        micro-batches.

        ``ends``: of these, embedding and head. ``block``: those of the smallest block.
        """
        recipe, seconds = self.on.recipe, self.on.links.seconds
        (_, shards, stride), (_, copies, copies_stride) = where
        reduced = 0 if self.frozen else elements * reduce_width(recipe)
        summed = seconds("all_reduce", reduced // shards, copies, copies_stride) if reduced else 0.0
        if shards == 1:
            return Exchange(once_backward=summed)
        scattered = seconds("reduce_scatter", reduced, shards, stride) if reduced else 0.0
        if zero == 3:
            gathered = seconds("all_gather", elements * gathered_width(recipe), shards, stride)
            if not passes:
                return Exchange(once_forward=gathered, once_backward=summed + scattered)
            # The last unit stays gathered for the backward pass; so may units configured to persist.
            again = 0.0
            if not self.persists:
                left = int(max(0, elements - ends) * max(0.0, 1 - UNITS[-1] / self.on.model.layers))
                again = seconds("all_gather", left * gathered_width(recipe), shards, stride) if left else 0.0
            bare = block * reduce_width(recipe) if reduced else 0
            return Exchange(
                passes * gathered,
                passes * (again + scattered),
                passes * seconds("all_gather", block * gathered_width(recipe), shards, stride)
                if block
                else 0.0,
                passes * seconds("reduce_scatter", bare, shards, stride) if bare else 0.0,
                once_backward=summed,
            )
        if not reduced:
            return Exchange()
        each_time = scattered if zero == 2 and passes else 0.0
        updated = seconds("all_gather", int(elements * weight_width(recipe)), shards, stride)
        ahead = self.on.stack.gathers_ahead
        return Exchange(
            backward=passes * each_time,
            once_forward=updated if ahead else 0.0,
            once_backward=summed + scattered - each_time,
            alone=0.0 if ahead else updated,
        )
