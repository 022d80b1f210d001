"""What would make it fit: the smallest changes to a layout; for a model, leaner states, LoRA, QLoRA, more GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from shoal.facts.config import Lora
from shoal.facts.layout import Layout, divisors
from shoal.facts.layout.legality import Case, broken
from shoal.facts.model.parameters import attention_projections
from shoal.facts.recipe import Recipe
from shoal.plan.amounts import seconds_per_step
from shoal.plan.explain import GIB
from shoal.plan.headroom import UNLIKELY
from shoal.plan.judge import UNRUN, Plan, judge
from shoal.plan.request import PlanRequest
from shoal.plan.scale import best, resized

# Policy changes to list.
NAMED = 4
# More devices than this multiple of the request are not a small change.
MOST_TIMES = 4096
# Counts tried between one that is too small and twice that, evenly spread over whole nodes.
BETWEEN = 8


@dataclass(frozen=True)
class Remedy:
    """One change and its result."""

    what: str
    plan: Plan

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "layout": str(self.plan.layout),
            "world": self.plan.world,
            "device_total": self.plan.memory.device_total,
            "device_p90": self.plan.memory.device_p90,
            "capacity": self.plan.memory.capacity,
            "step_seconds": self.plan.step.seconds,
            "tokens_per_s_per_gpu": self.plan.tokens_per_s_per_gpu,
            "support": self.plan.support,
        }

    def __str__(self) -> str:
        memory = self.plan.memory
        return (
            f"{self.what}: {memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f} GiB, "
            f"{seconds_per_step(self.plan.step.seconds)} s/step ({self.plan.layout})"
            f"{'' if self.plan.runs else f'; {UNRUN}'}"
        )


def for_layout(asked: PlanRequest, layout: Layout) -> list[Remedy]:
    """Changes to a layout that each make it fit, then leaner states, LoRA, another layout, more GPUs.

    What the engine runs comes first, and of that the smallest change; then, as in choosing a layout, what offloads
    nothing and is unlikely to run out of memory, and of that the fastest.
    """
    tried: list[tuple[int, Remedy]] = []
    for what, changes in _changes(layout, asked):
        changed = layout.replace(**changes)
        if changed != layout and _legal(asked, changed):
            plan = judge(asked.workload(changed))
            if plan.fits:
                tried.append((len(changes), Remedy(what, plan)))
    tried.sort(key=lambda pair: (not pair[1].plan.runs, pair[0], *_reluctance(layout, pair[1].plan)))
    found = [remedy for _, remedy in tried[:NAMED]]
    for what, leaner in _leaner(asked):
        if _legal(leaner, layout):
            plan = judge(leaner.workload(layout))
            if plan.fits:
                found.append(Remedy(what, plan))
    elsewhere = best(replace(asked, layout=None))
    if elsewhere:
        found.append(Remedy("another layout on these GPUs", elsewhere))
    return _run_first([*found, *_grown(asked, layout)])


def _reluctance(layout: Layout, plan: Plan) -> tuple[bool, bool, float]:
    return plan.layout.offload != layout.offload, plan.out_of_memory > UNLIKELY, plan.step.seconds


def for_model(asked: PlanRequest, runnable: bool = False) -> list[Remedy]:
    """If nothing fits: leaner states or LoRA on the given GPUs, or the fewest GPUs on which something fits.

    ``runnable``: only what the engine runs.
    """
    found = on_these(asked)
    more = more_devices(asked, runnable)
    if more:
        resting = " without offload" if runnable and not more.layout.offload else ""
        found.append(Remedy(f"{more.world} GPUs{resting}", more))
    return _run_first(found)


def on_these(asked: PlanRequest, resting: bool = False) -> list[Remedy]:
    """Leaner states, LoRA and QLoRA on the given GPUs. ``resting``: without offload."""
    found = []
    for what, changed in _leaner(asked):
        plan = best(replace(changed, layout=None))
        if plan and not (resting and plan.layout.offload):
            found.append(Remedy(f"{what} on these GPUs", plan))
    return found


def _leaner(asked: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """The same run with less state per weight, the smallest change first: states in fewer bits, adapters over frozen
    weights, and those in 4 bits."""
    recipe, lora = asked.recipe, asked.lora
    for states, what in (("bf16", "states=bf16"), ("int8", "states=int8, moments in 8 bits")):
        if lora is None and recipe.states == "fp32" and recipe.precision in ("bf16", "fp16"):
            try:
                lean = Recipe.model_validate({**recipe.model_dump(exclude_unset=True), "states": states})
            except ValidationError:
                continue  # this optimizer has no such states
            yield what, replace(asked, recipe=lean)
    usual = Lora(targets=list(attention_projections(asked.model)))
    if lora is None:
        yield f"LoRA with rank {usual.rank}", replace(asked, lora=usual)
    if lora is None or lora.base != "nf4":
        packed = (lora or usual).model_copy(update={"base": "nf4"})
        yield f"QLoRA with rank {packed.rank}, frozen weights in 4 bits", replace(asked, lora=packed)


def _run_first(remedies: list[Remedy]) -> list[Remedy]:
    """What can be trained now before what is only planned."""
    return sorted(remedies, key=lambda remedy: not remedy.plan.runs)


def more_devices(asked: PlanRequest, runnable: bool = False) -> Plan | None:
    """The best plan on the fewest devices on which one fits: whole nodes, and within an eighth for large counts."""
    devices, node = asked.cluster.devices, asked.cluster.devices_per_node
    few, many = devices, max(2 * devices, asked.cluster.device.devices_per_node or 1)
    while many <= MOST_TIMES * devices:
        if plan := _on(asked, many, runnable):
            step = max(node, (many - few) // BETWEEN // node * node)
            fewer = (_on(asked, count, runnable) for count in range(few + step, many, step))
            return next(filter(None, fewer), plan)
        few, many = many, 2 * many
    return None


def _on(asked: PlanRequest, devices: int, runnable: bool) -> Plan | None:
    workload = resized(asked, devices)
    return best(workload, runnable) if workload else None


def _changes(layout: Layout, asked: PlanRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes, in words, that keep the division of the work."""
    workload = asked.workload(layout)
    for size in divisors(workload.micro):
        if size < workload.micro:
            yield f"micro={size}", {"micro": size}
    for recompute in ("selective", "full"):
        yield f"recompute={recompute}", {"recompute": recompute}
        yield f"recompute={recompute},micro=1", {"recompute": recompute, "micro": 1}
    if layout.dp > 1:
        yield "shard over all data ranks", {"dp": 1, "fsdp": layout.data_ranks, "zero": 3}
    for zero in range(layout.zero + 1, 4):
        yield f"zero={zero}", {"zero": zero}
    # A CPU's memory is its host's.
    for parts in (
        ("optimizer", "optimizer+params", "activations") if asked.cluster.device.name != "cpu" else ()
    ):
        offload = Layout.parse(f"offload={parts}").offload
        yield f"offload={parts}", {"offload": offload}
        yield (
            f"offload={parts},recompute=full,micro=1",
            {"offload": offload, "recompute": "full", "micro": 1},
        )


def _legal(asked: PlanRequest, layout: Layout) -> bool:
    recipe = asked.recipe
    return not any(broken(Case.of(layout, asked.model, recipe, asked.cluster)))


def _grown(asked: PlanRequest, layout: Layout) -> Iterator[Remedy]:
    """The same layout with two, four, … times as many ranks that shard: the first that fits."""
    times = 2
    while times <= MOST_TIMES:
        workload = resized(asked, asked.cluster.devices * times)
        grown = layout.replace(fsdp=layout.fsdp * times)
        if workload and _legal(workload, grown):
            plan = judge(workload.workload(grown))
            if plan.fits:
                yield Remedy(f"{grown.world} GPUs", plan)
                return
        times *= 2
