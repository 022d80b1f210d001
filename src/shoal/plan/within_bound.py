"""Exchanges within layers, per micro-batch: tensor ranks, context ranks and expert ranks.

Each depends on few decisions, so most layouts hit the cache: tensor ranks exchange as much for a part of a long
sequence as for a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal.facts.layout import Recompute
from shoal.facts.layout.expert_nodes import EXCHANGES
from shoal.plan.space import ModelSplit, RankWork, layout_of
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import RankParameters
from shoal.predict.time import context
from shoal.predict.time import expert as experts
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.layer import LayerShare
from shoal.predict.time.step import ALWAYS, beside_products, within_pass
from shoal.predict.traffic import expert, tensor
from shoal.predict.workload import Workload


@dataclass(eq=False)
class WithinBound:
    """``asked``: a workload with any layout. ``body``: all layers' parameters, by ``tp`` and ``sp``."""

    on: CostModel
    asked: Workload
    body: Callable[[int, bool], RankParameters]
    _tensor: dict[tuple[object, ...], float] = field(default_factory=dict)
    _context: dict[tuple[object, ...], float] = field(default_factory=dict)
    _experts: dict[tuple[object, ...], float] = field(default_factory=dict)

    def of_tensor(
        self, split: ModelSplit, share: RankWork, recompute: Recompute, compiled: bool, tokens: int
    ) -> float:
        """Per layer."""
        if split.tp == 1:
            return 0.0
        sp, _, ep, micro = share
        key = split.tp, sp, tokens, micro > 1, ep > 1, *_passes(recompute, compiled)
        known = self._tensor.get(key)
        if known is None:
            body = self.body(split.tp, sp)
            # With adapters every layer is assumed to be the first, which exchanges the least: a rank may have few
            # others.
            if self.asked.lora is not None:
                body = replace(body, dense=int(body.dense > 0), sparse=int(not body.dense))
            workload = self._workload(split, share, recompute, compiled)
            seconds = sum(self._seconds(workload, call) for call in tensor.calls(workload, body))
            known = self._tensor[key] = seconds / body.layers
        return known

    def of_context(
        self, split: ModelSplit, share: RankWork, recompute: Recompute, compiled: bool, part: LayerShare
    ) -> float:
        """Per layer; ``part``: a rank's share of it."""
        if split.cp == 1:
            return 0.0
        key = split.tp, split.cp, share.cp_kind, share.micro, *_passes(recompute, compiled)
        known = self._context.get(key)
        if known is None:
            body = self.body(split.tp, share.sp)
            workload = self._workload(split, share, recompute, compiled)
            known = sum(context.waits(workload, self.on, body, part).values()) / body.layers
            self._context[key] = known
        return known

    def of_experts(
        self, split: ModelSplit, share: RankWork, recompute: Recompute, compiled: bool, part: LayerShare
    ) -> float:
        """For all layers with experts; ``part``: a rank's share of one."""
        sp, _, ep, micro = share
        # Computation that it may overlap with.
        beside: tuple[float, ...] = self.on.shared_experts(part)
        if part.expert_parts > 1:
            beside += self.on.routed_experts(part)
        if self.asked.stack.expert_overlap:
            beside = self.on.layer(part)
        key = split.tp, split.cp, sp, ep, micro, *_passes(recompute, compiled), beside
        known = self._experts.get(key)
        if known is None:
            body = self.body(split.tp, sp)
            workload = self._workload(split, share, recompute, compiled)
            waits = experts.waits(workload, self.on, body, part).values()
            known = sum(sum(by_pass.values()) for by_pass in waits)
            for call in expert.tokens(workload, body):
                if call.group not in EXCHANGES:
                    known += self._seconds(workload, call)
            self._experts[key] = known
        return known

    def _workload(self, split: ModelSplit, share: RankWork, recompute: Recompute, compiled: bool) -> Workload:
        """One micro-batch on one rank, with as many replicas as expert ranks, so that these have a place."""
        sp, kind, ep, micro = share
        layout = layout_of(
            dp=ep, tp=split.tp, sp=sp, cp=split.cp, cp_kind=kind, ep=ep, micro=micro, recompute=recompute
        )
        recipe = self.asked.recipe.model_copy(update={"batch": ep * micro})
        return replace(self.asked, layout=layout, recipe=recipe, compile=compiled)

    def _seconds(self, workload: Workload, call: CollectiveCall) -> float:
        ranks = workload.ranks_of(call.group)
        if call.phase in ALWAYS:
            each = within_pass(self.on, workload, call, ranks)
        else:
            each = self.on.links.seconds(call.op, call.bytes, ranks.size, ranks.stride)
        return call.count * beside_products(self.asked.stack, workload.layout.sp, call) * each


def _passes(recompute: Recompute, compiled: bool) -> tuple[Recompute, bool]:
    """What exchanges depend on: compiled blocks differ in what they recompute."""
    return recompute, compiled and recompute != "none"
