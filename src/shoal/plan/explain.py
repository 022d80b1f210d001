"""Explain a plan: where its step time goes, what fills its memory, how it compares with others."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.facts.cluster import Cluster
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.ledger import Ledger
from shoal.plan.judge import Plan
from shoal.predict.workload import Workload

GIB = 2**30
# Parts below this share of a step are not mentioned.
WORTH_SAYING = 0.03
# From this fill level on, the next larger micro-batch does not fit.
FULL = 0.85

HELD = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
}
SPENT = {
    "compute": "computation",
    "recompute": "recomputation",
    "exposed_comm": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "offload": "offload",
    "other": "host",
}


@dataclass(frozen=True)
class StepPart:
    """Something that a step spends time on."""

    name: str
    seconds: float
    share: float  # of the step


def parts(plan: Plan) -> list[StepPart]:
    """What a step's time goes to, largest first; communication by the link it waits for."""
    spent = plan.step
    seconds = {
        words: getattr(spent, name) for name, words in SPENT.items() if name not in ("exposed_comm", "other")
    }
    seconds["host"] = spent.other
    named = 0.0
    for group, waits in spent.links.items():
        if waits > 0:
            named += waits
            seconds[f"{group} over {link(group, plan.workload)}"] = waits
    # What is exchanged once per step, such as gradients at the end, belongs to no group of a micro-batch.
    seconds["gradient and weight exchange"] = max(0.0, spent.exposed_comm - named)
    found = [StepPart(name, each, each / spent.seconds) for name, each in seconds.items() if each > 0]
    return sorted(found, key=lambda part: -part.seconds)


def link(group: str, workload: Workload) -> str:
    """The slowest link that a group of ranks crosses."""
    _, ranks, stride = workload.ranks_of(group)
    return link_across(ranks, stride, workload.cluster)


def link_across(ranks: int, stride: int, cluster: Cluster) -> str:
    """The slowest link within a group of ``ranks`` that are ``stride`` apart."""
    fast = cluster.fast
    if fast is not None and ranks * stride <= cluster.fast_domain:
        return fast.kind
    if ranks * stride <= cluster.devices_per_node:
        return cluster.device.host_link.kind
    return cluster.network.kind


def binds(plan: Plan) -> str:
    """The bottleneck in a few words: a part of the step or, if the plan does not fit, of memory."""
    if not plan.fits:
        return _host(plan.memory) if plan.memory.device_fits else f"memory: {largest_part(plan.memory)}"
    first, *rest = parts(plan)
    said = [first]
    if rest and rest[0].share >= WORTH_SAYING:
        said.append(rest[0])
    return ", ".join(f"{part.name} {part.share:.0%}" for part in said)


def lacks(memory: Ledger) -> str:
    """What is too large in a plan that does not fit, and where: on the device, or in host memory."""
    if not memory.device_fits:
        return f"needs {memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f} GiB, mostly {largest_part(memory)}"
    return _host(memory)


def _host(memory: Ledger) -> str:
    if memory.host <= memory.host_capacity:
        return f"NVMe: {memory.nvme / GIB:.0f} of {memory.nvme_capacity / GIB:.0f} GiB per device"
    return f"host memory: {memory.host / GIB:.0f} of {memory.host_capacity / GIB:.0f} GiB per device"


def largest_part(memory: Ledger) -> str:
    name = max(HELD, key=lambda part: int(getattr(memory, part)))
    return f"{HELD[name]} {getattr(memory, name) / GIB:.1f} GiB"


def why(plan: Plan) -> str:
    """The bottleneck in sentences."""
    spent = [part for part in parts(plan) if part.share >= WORTH_SAYING]
    time = ", ".join(f"{part.name} {part.share:.0%}" for part in spent)
    return f"Step time: {time}. {_memory(plan)}"


def _memory(plan: Plan) -> str:
    memory = plan.memory
    sizes = f"{memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f} GiB"
    if not plan.fits:
        return f"It does not fit: {lacks(memory)}."
    if memory.device_p90 > FULL * memory.capacity:
        return f"Memory is nearly full: {sizes}, mostly {largest_part(memory)}."
    return f"Memory is not the limit: {sizes}."


def against(plan: Plan, best: Plan) -> str:
    """By how much a plan loses to the best, and because of what."""
    if not plan.fits:
        return f"does not fit: {lacks(plan.memory)}"
    slower = plan.step.seconds / best.step.seconds - 1
    gaps = {words: getattr(plan.step, name) - getattr(best.step, name) for name, words in SPENT.items()}
    costs = sorted(((gap, words) for words, gap in gaps.items() if gap > 0), reverse=True)
    most = [f"{words} +{gap / best.step.seconds:.0%}" for gap, words in costs[:2] if gap > 0.005]
    reason = f": {', '.join(most)}" if most else ""
    if slower <= best.error_bar:
        return f"tie: {slower:+.1%} is within the error bar{reason}"
    return f"{slower:.0%} slower{reason}"


def percent(share: float | None) -> str:
    """``45.3%``; unknown if the device's maker states no peak."""
    return "unknown" if share is None else f"{share:.1%}"


def strategy(layout: Layout, lora: Lora | None = None) -> str:
    """A layout's strategy under its common name."""
    data = layout.shards
    if data > 1:
        sharded = {1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP (ZeRO-3)"}[layout.zero]
        names = [f"HSDP, {sharded} in groups of {data}" if layout.dp > 1 else sharded]
    else:
        names = ["DDP"] if layout.dp > 1 else []
    if layout.tp > 1:
        names.append("tensor parallelism" if not layout.sp else "tensor and sequence parallelism")
    if layout.cp > 1:
        names.append(f"context parallelism ({layout.cp_kind})")
    if layout.pp > 1:
        names.append(f"pipeline ({layout.schedule})")
    if layout.ep > 1:
        names.append("expert parallelism")
    if len(names) >= 3 and layout.tp > 1 and layout.pp > 1:
        names[0] = f"3D: {names[0]}"
    said = " + ".join(names) or "one GPU"
    if layout.offload:
        said += " with offload of " + " and ".join(part.what for part in layout.offload)
    if lora is None:
        return said
    kind = {"lora": "LoRA", "dora": "DoRA"}[lora.kind]
    return f"{'Q' * (lora.base == 'nf4')}{kind} {'with' if names else 'on'} {said}"
