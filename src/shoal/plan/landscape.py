"""The data of a plan's page: a request and its neighbours, layouts as points, their frontier, and the best of them.

A space has up to millions of layouts. Some of every strategy are drawn, each priced normally; what the search found is
always included.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from shoal.facts.layout import RECOMPUTES, Layout
from shoal.facts.layout.ranks import line
from shoal.facts.ledger import Ledger
from shoal.facts.problem import BadInput
from shoal.facts.traffic import read_ranks
from shoal.plan import scale
from shoal.plan.explain import HELD, SPENT, binds, lacks, link_across, strategy
from shoal.plan.judge import Plan, replicas
from shoal.plan.report import PlanReport
from shoal.plan.request import PlanRequest
from shoal.plan.search import searched
from shoal.plan.space import Candidate, PipelineOrder, Space
from shoal.predict.memory import ledger
from shoal.predict.time.step import cost_model, step

# Layouts to price for the picture of the request, and of each neighbour.
MANY, SOME = 360, 40
# Best plans shown in full.
BEST = 4
ANY = "any"
# Memory beyond this multiple of the device's is just "far too much".
FARTHEST = 4.0


@dataclass(frozen=True)
class Cell:
    """One request of the grid, with what a page needs."""

    devices: int
    batch: int
    seq: int
    content: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.devices}|{self.batch}|{self.seq}"


def landscape(
    found: PlanReport, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Cell]:
    """The request's own cell first, then those of other device counts, batches and sequence lengths.

    A requested layout is shown among others on the same devices, and nowhere else.
    """
    asked = found.asked
    own = _cell(asked, [*found.plans, *([found.choice] if found.choice else [])], found.choice, MANY)
    others = [] if asked.layout is not None else list(_beside(asked))
    total = 1 + len(others)
    progress(1, total)
    cells = [own]
    for cell in _searched(others):
        cells.append(cell)
        progress(len(cells), total)
    return cells


def _beside(asked: PlanRequest) -> Iterator[PlanRequest]:
    """Half and twice of what was asked for, if possible."""
    recipe, devices = asked.recipe, asked.cluster.devices
    counts = [devices // 4, devices // 2, devices, 2 * devices]
    on = {
        count: request
        for count in dict.fromkeys(counts)
        if count >= 1 and (request := asked if count == devices else scale.resized(asked, count))
    }
    if asked.cluster.device.name == "cpu" or asked.cluster.name == "local":
        on = {devices: asked}  # this machine's devices are fixed
    rows = recipe.loss_facts.rows
    batches = [
        batch
        for batch in (recipe.batch // 2, recipe.batch, 2 * recipe.batch)
        if batch >= rows and batch % rows == 0
    ]
    longest = asked.model.max_positions if asked.model.positions == "learned" else None
    lengths = [
        seq
        for seq in (recipe.seq // 2, recipe.seq, 2 * recipe.seq)
        if seq >= 1 and (longest is None or seq <= max(longest, recipe.seq))
    ]
    for request in on.values():
        for batch in dict.fromkeys(batches):
            for seq in dict.fromkeys(lengths):
                if (request is asked, batch, seq) != (True, recipe.batch, recipe.seq):
                    yield replace(request, recipe=recipe.model_copy(update={"batch": batch, "seq": seq}))


def _searched(requests: Sequence[PlanRequest]) -> Iterator[Cell]:
    """Search on all cores with forked processes, which inherit the measured rates."""
    workers = min(len(requests), os.cpu_count() or 1)
    if workers < 2 or multiprocessing.get_start_method() != "fork":
        yield from map(_other, requests)
        return
    # The parent's uncollected garbage may wait for its threads, which forked children do not have.
    with ProcessPoolExecutor(workers, initializer=gc.freeze) as pool:
        yield from pool.map(_other, requests)


def _other(asked: PlanRequest) -> Cell:
    try:
        found = searched(asked.workload(Layout()), 1, headroom=asked.headroom)
    except BadInput:  # no layout on this many devices divides the batch
        return _cell(asked, [], None, 0)
    plan = found.chosen.plan if found.chosen else None
    return _cell(asked, [*found.plans, *([plan] if plan else [])], plan, SOME)


def _cell(asked: PlanRequest, plans: Iterable[Plan], chosen: Plan | None, most: int) -> Cell:
    known = {plan.layout: plan for plan in plans}
    every = [*known.values(), *_priced(asked, known, most)]
    points = [plan for plan in every if plan.memory.device_p90 <= FARTHEST * plan.memory.capacity]
    best = {name: _best(every, chosen, None if name == ANY else name) for name in (ANY, *RECOMPUTES)}
    cluster, recipe = asked.cluster, asked.recipe
    content = {
        "capacity": cluster.device.memory_bytes,
        "nodes": cluster.nodes,
        "per_node": cluster.devices_per_node,
        "points": [_point(plan) for plan in points],
        "far": len(every) - len(points),
        "frontier": {
            name: frontier([plan for plan in points if name in (ANY, plan.layout.recompute)])
            for name in (ANY, *RECOMPUTES)
        },
        "best": {
            name: [_told(asked, plan, plan is chosen) for plan in found] for name, found in best.items()
        },
    }
    return Cell(cluster.devices, recipe.batch, recipe.seq, content)


def _priced(asked: PlanRequest, known: dict[Layout, Plan], most: int) -> Iterator[Plan]:
    """Layouts of every strategy: each recomputation, states over all ranks or over none, the smallest, a middle and
    the largest micro-batch.
    """
    workload = asked.workload(Layout())
    space = Space(asked.model, asked.recipe, asked.cluster.devices, lora=asked.lora)
    if asked.stack.name != "shoal":
        space = replace(space, stack=asked.stack.name)
    found = list(dict.fromkeys(one.layout() for one in _some(space)))
    chosen = (
        [found[place * len(found) // most] for place in range(most)]
        if 0 < most < len(found)
        else found[:most]
    )
    on = cost_model(workload)
    against = None
    for layout in dict.fromkeys(chosen):
        if layout in known:
            continue
        one = replace(workload, layout=layout)
        against = against or replicas(one, on)
        yield Plan(one, ledger(one), step(one, on), against)


def _some(space: Space) -> Iterator[Candidate]:
    for split in space.splits():
        plain = space.orders(split)
        orders = [order for order in plain if order.schedule == "1f1b" and order.chunks == 1] or plain[
            : len(RECOMPUTES)
        ]
        for alike in space.shares_by_size(split):
            for share in dict.fromkeys((alike[0], alike[len(alike) // 2], alike[-1])):
                for states in space.sharings(split, share.ep):
                    for order in orders:
                        one = Candidate(split, share, PipelineOrder(*order), states[0], 1)
                        if space.admits(one):
                            yield one


def _best(plans: Sequence[Plan], chosen: Plan | None, recompute: str | None) -> list[Plan]:
    """The fastest plan of each strategy that fits, the chosen one first."""
    able = [plan for plan in plans if plan.fits and recompute in (None, plan.layout.recompute)]
    first = [plan for plan in able if plan is chosen]
    fastest = sorted((plan for plan in able if plan is not chosen), key=lambda plan: plan.step.seconds)
    found: dict[tuple[object, ...], Plan] = {}
    for plan in (*first, *fastest):
        layout = plan.layout
        found.setdefault(
            (*layout.degrees.values(), layout.zero, layout.recompute, bool(layout.offload)), plan
        )
    return list(found.values())[:BEST]


def frontier(plans: Iterable[Plan]) -> list[tuple[float, int]]:
    """The Pareto frontier of time and memory, from the slowest to the fastest point."""
    kept: list[tuple[float, int]] = []
    least: int | None = None
    for plan in sorted(
        (plan for plan in plans if plan.fits),
        key=lambda one: (-one.tokens_per_s_per_gpu, one.memory.device_p90),
    ):
        if least is None or plan.memory.device_p90 < least:
            least = plan.memory.device_p90
            kept.append((_short(plan.tokens_per_s_per_gpu), least))
    return kept[::-1]


def _point(plan: Plan) -> list[Any]:
    reason = "" if plan.fits else lacks(plan.memory)
    rate = _short(plan.tokens_per_s_per_gpu)
    return [rate, plan.memory.device_p90, RECOMPUTES.index(plan.layout.recompute), str(plan.layout), reason]


def _told(asked: PlanRequest, plan: Plan, chosen: bool) -> dict[str, Any]:
    total = scale.cost(plan, asked.tokens, asked.price) if asked.tokens else None
    plan.called = asked.model_name
    return {
        "layout": str(plan.layout),
        "words": strategy(plan.layout, plan.workload.lora),
        "chosen": chosen,
        "runs": plan.runs,
        "degrees": plan.degrees,
        "world": plan.world,
        "seconds": plan.step.seconds,
        "error_bar": plan.error_bar,
        "rate": plan.tokens_per_s_per_gpu,
        "mfu": plan.mfu,
        "memory": _held(plan.memory),
        "needs": plan.memory.device_p90,
        "step": {name: getattr(plan.step, name) for name in SPENT},
        "binds": binds(plan),
        "command": plan.command,
        "days": total.days if total else None,
        "gpu_hours": total.gpu_hours if total else None,
        "cost": total.cost if total else None,
        "axes": _axes(plan),
    }


def _held(memory: Ledger) -> dict[str, int]:
    """Memory by category, including what a device needs beyond tensors: the sum must fit."""
    parts = {name: int(getattr(memory, name)) for name in HELD}
    return {**parts, "reserve": max(0, memory.device_p90 - sum(parts.values()))}


def _axes(plan: Plan) -> list[dict[str, Any]]:
    """Every group of ranks that communicates: its size, its link, what it sends, and how long the step waits for it."""
    sent: dict[str, tuple[int, int]] = {}
    for row in plan.traffic:
        calls, size = sent.get(row.group, (0, 0))
        sent[row.group] = calls + row.count, size + row.bytes
    rows = []
    for group, (calls, size) in sorted(sent.items(), key=lambda one: -one[1][1]):
        name, ranks, stride = _who(group, plan)
        rows.append(
            {
                "group": name,
                "ranks": ranks,
                "stride": stride,
                "link": link_across(ranks, stride, plan.workload.cluster),
                "calls": calls,
                "bytes": size,
                "exposed": plan.step.links.get(name),
            }
        )
    return rows


def _who(group: str, plan: Plan) -> tuple[str, int, int]:
    """A group's name, size and stride; a pipeline's messages are named after their ranks."""
    listed = read_ranks(group)
    if not listed:
        _, ranks, stride = plan.workload.ranks_of(group)
        return group, ranks, stride
    name = "pp" if listed == line(listed[0], "pp", plan.layout) else group
    return name, len(listed), listed[1] - listed[0] if len(listed) > 1 else 1


def _short(value: float) -> float:
    return float(f"{value:.5g}")
