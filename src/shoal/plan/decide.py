"""The decision in plain words: what to run and why, and when not to distribute at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal.facts.cluster.stack import SHOAL
from shoal.facts.config import Lora
from shoal.facts.layout import OFFLOADABLE, Offload
from shoal.facts.layout.offload import waiting
from shoal.facts.model.parameters import attention_projections, parameter_count
from shoal.plan.amounts import DAY, HOUR
from shoal.plan.batch import BatchAdvice, batch_advice
from shoal.plan.choose import Chosen
from shoal.plan.explain import GIB, binds, lacks, percent, strategy
from shoal.plan.headroom import chance, free
from shoal.plan.judge import UNRUN, Plan, engine_runs
from shoal.plan.remedy import Remedy
from shoal.plan.request import PlanRequest
from shoal.plan.scale import best, cost, resized
from shoal.predict.memory.device import host_memory

# The share of a step from which communication is questioned: would fewer GPUs do as well?
MUCH = 0.25
# Scaling counts as good if nodes reach this share of linear throughput.
WELL = 0.75
# Steps shorter than this leave little time to read a batch.
HASTY = 0.1


@dataclass(frozen=True)
class Decision:
    """What to do, and all arguments against doing it on many GPUs."""

    text: str
    distribute: bool
    reasons: list[str]  # not to distribute, or to look elsewhere first
    batch: BatchAdvice | None = None  # if the batch is the limit

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "batch": self.batch.as_json() if self.batch else None}


def decide(asked: PlanRequest, plans: list[Plan], chosen: Chosen | None, remedies: list[Remedy]) -> Decision:
    """``plans``: fastest first; if none fits, ``remedies`` say what would."""
    plan = chosen.plan if chosen else next(iter(plans), None)
    if plan is None or not plan.fits:
        return Decision(_nothing_fits(asked, plans, remedies), True, [])
    if chosen is None and asked.layout is None:
        return Decision(_nothing_runs(asked, plan, remedies), True, [])
    if chosen is None:  # a given layout is judged alone, without comparing others or other GPU counts
        sentences = [f"{plan.layout} fits: {_numbers(plan)}", _beside_ddp(plan), *_unrun(plan, remedies)]
        return Decision(" ".join(sentences), plan.world > 1, _input(plan))
    run = f"Run {plan.layout}: {_numbers(plan)}"
    sentences = [run, chosen.why, *chosen.differ, *not_run(plan, plans), _beside_ddp(plan)]
    advice = batch_advice(asked, plan)
    distribute, reasons = _not_to_distribute(asked, plan, starved=advice is not None)
    text = " ".join([*sentences, *_unrun(plan, remedies)])
    limits = [advice.text] if advice else []
    return Decision(text, distribute, [*reasons, *limits, *_input(plan)], advice)


def _numbers(plan: Plan) -> str:
    memory = plan.memory
    named = strategy(plan.layout, plan.workload.lora).replace("one GPU", f"one {_device(plan)}")
    return (
        f"{named}, {duration(plan.step.seconds)}/step ± {plan.error_bar:.0%}, "
        f"{plan.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {percent(plan.mfu)}, "
        f"{memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f} GiB ({free(memory)}, out of memory "
        f"{chance(plan.out_of_memory)}); {binds(plan)}."
    )


def _device(plan: Plan) -> str:
    return "process on the CPU" if plan.workload.cluster.device.name == "cpu" else "GPU"


def not_run(plan: Plan, plans: list[Plan]) -> list[str]:
    """Faster layouts than the chosen one that the engine does not run yet."""
    fastest = plans[0]
    if not plan.runs or fastest.runs or fastest.step.seconds >= plan.step.seconds:
        return []
    faster = plan.step.seconds / fastest.step.seconds - 1
    return [f"{fastest.layout} is predicted to be {faster:.0%} faster, but is {UNRUN} ({fastest.lacks})."]


def _unrun(plan: Plan, remedies: list[Remedy]) -> Iterator[str]:
    """For a plan that the engine does not run: why, and what it needs of a node."""
    if plan.layout.offload:
        yield _offloaded(plan, remedies)
    if not plan.runs:
        if plan.workload.stack is SHOAL:
            yield f"It is {UNRUN} ({plan.lacks}); --export writes it for another stack."
        else:
            name = plan.workload.stack.name
            yield f"{name} does not run it ({plan.lacks}); --export writes the nearest that it does."


def _beside_ddp(plan: Plan) -> str:
    if plan.world == 1:
        return f"One {_device(plan)}: nothing to distribute."
    if plan.ddp_fits:
        return f"Throughput is {plan.vs_ddp:.2f} times that of plain DDP, which also fits."
    needed, there = plan.replicas.bytes / GIB, plan.memory.capacity / GIB
    return f"Plain DDP needs {needed:,.0f} GiB on every GPU, which has {there:.1f}."


def _offloaded(plan: Plan, remedies: list[Remedy]) -> str:
    memory, per_node = plan.memory, min(plan.world, plan.workload.cluster.devices_per_node)
    kept: dict[str, list[str]] = {"in host memory": [], "on NVMe": []}
    parts = (waiting(plan.layout.offload, what) for what in OFFLOADABLE)
    for where, what in (pair for part in parts if part for pair in _waits(part)):
        kept[where].append(what)
    sizes = {"in host memory": memory.host, "on NVMe": memory.nvme}
    places = [
        f"{sizes[where] * per_node / GIB:,.0f} GiB {where} ({', '.join(what)})"
        for where, what in kept.items()
        if what
    ]
    without = next((remedy for remedy in remedies if remedy.what.endswith("without offload")), None)
    said = f"Off the device wait, per node: {' and '.join(places)}."
    cluster = plan.workload.cluster
    if memory.host and cluster.host_memory is None:
        each = host_memory(cluster) / GIB
        said += f" A host is taken to have {each:.0f} GiB for each GPU; host_memory in a cluster file says otherwise."
    return f"{said} Without it: {without}." if without else said


def _waits(part: Offload) -> Iterator[tuple[str, str]]:
    """Which parts of a layout are offloaded, and where to."""
    there = "on NVMe" if part.nvme else "in host memory"
    share = "" if part.fraction == 1.0 else f" of {part.fraction:.0%} of the parameters"
    if part.what == "optimizer" and part.nvme:
        yield there, f"master weights and optimizer states{share}"
        yield "in host memory", f"gradients and new weights{share}"
    elif part.what == "optimizer":
        yield there, f"master weights, optimizer states and gradients{share}"
    elif part.what == "params":
        yield there, f"weights{share}"
    else:
        yield there, "inputs of recomputed blocks"


def _nothing_fits(asked: PlanRequest, plans: list[Plan], remedies: list[Remedy]) -> str:
    named = asked.layout or (f"{asked.model.name} on {asked.cluster}")
    text = f"Nothing fits: no layout of {named} fits in memory."
    if plans:
        memory = plans[0].memory
        text = f"{plans[0].layout} does not fit: {lacks(memory)}."
    if remedies:
        return f"{text} Smallest change that fits: {remedies[0]}."
    return f"{text} None of the changes tried makes it fit."


def _nothing_runs(asked: PlanRequest, plan: Plan, remedies: list[Remedy]) -> str:
    """The answer when something fits, but nothing that the engine runs."""
    if not engine_runs(plan.workload):
        return (
            f"The engine does not run this yet ({plan.lacks}), in any layout. Planned: {plan.layout}: {_numbers(plan)} "
            "--export writes it for another stack, where that runs it."
        )
    text = (
        f"No layout of {asked.model.name} on {asked.cluster} that the engine runs fits in memory. {plan.layout} "
        f"would fit ({duration(plan.step.seconds)}/step), but is {UNRUN} ({plan.lacks}); --export writes it for "
        "another stack."
    )
    return f"{text} Smallest change that fits: {remedies[0]}." if remedies else text


# When not to distribute.


def _not_to_distribute(asked: PlanRequest, plan: Plan, starved: bool) -> tuple[bool, list[str]]:
    """``starved``: the batch is the limit, so the network is not to blame."""
    if plan.world == 1:
        return False, []
    slow = [] if starved else _slow_network(asked, plan)
    one = _on_one(asked)
    if one is None:
        return True, [*slow, *_lora(asked)]
    faster = plan.tokens_per_s / one.tokens_per_s
    if faster <= 1:
        reason = f"{plan.world} GPUs are slower than one ({faster:.2f} times its throughput): the links are too slow."
        return False, [reason]
    reasons, distribute = [], True
    where = f"It fits on one GPU ({one.layout}, {one.memory.device_p90 / GIB:.1f} GiB)"
    gain = f"{plan.world} GPUs are {faster:.1f} times as fast"
    if asked.tokens is not None:
        seconds = cost(one, asked.tokens).seconds
        if seconds < HOUR:
            reasons.append(f"The job is short ({duration(seconds)} on one GPU): do not distribute it.")
            distribute = False
        elif seconds < DAY:
            reasons.append(
                f"{where} and takes {duration(seconds)} there: distribute only if you cannot wait a day; {gain}."
            )
            distribute = False
        else:
            reasons.append(f"{where}, but takes {duration(seconds)} there; {gain}.")
    else:
        reasons.append(
            f"{where}; {gain}. A job that takes less than a day on one GPU need not be distributed."
        )
    if faster < plan.world / 2:
        reasons.append(f"Scaling efficiency is below 50%: {plan.world} GPUs do the work of {faster:.1f}.")
    return distribute, [*reasons, *slow]


def _on(asked: PlanRequest, devices: int) -> Plan | None:
    """The best plan on this many devices, unless even the weights in 2 bytes each do not fit."""
    if 2 * parameter_count(asked.model) > devices * asked.cluster.device.memory_bytes:
        return None
    fewer = resized(asked, devices)
    return best(fewer, runnable=True) if fewer else None


def _on_one(asked: PlanRequest) -> Plan | None:
    """The best plan on one GPU; one that offloads is no reason to stay there."""
    one = _on(asked, 1)
    return None if one and one.layout.offload else one


def _slow_network(asked: PlanRequest, plan: Plan) -> list[str]:
    """A note if one node does as well as all of them."""
    cluster = asked.cluster
    if cluster.nodes == 1 or plan.step.exposed_comm < MUCH * plan.step.seconds:
        return []
    inside = _on(asked, cluster.devices_per_node)
    if inside is None:
        return []
    faster = plan.tokens_per_s / inside.tokens_per_s
    if faster <= 1:
        return [
            f"One node alone is {1 / faster:.2f} times as fast: the network ({cluster.network.kind}) is too slow."
        ]
    if faster > WELL * cluster.nodes:
        return []
    return [
        f"{cluster.nodes} nodes are only {faster:.1f} times as fast as one: the network is the bottleneck."
    ]


def _lora(asked: PlanRequest) -> list[str]:
    """A note if LoRA would fit on one GPU and full training does not."""
    if asked.lora is not None:
        return []
    plan = _on_one(replace(asked, lora=Lora(targets=list(attention_projections(asked.model)))))
    if plan is None:
        return []
    marked = "" if plan.runs else f" ({UNRUN})"
    return [
        f"For fine-tuning, LoRA with rank {Lora().rank} fits on one GPU: "
        f"{plan.memory.device_p90 / GIB:.1f} GiB, {plan.tokens_per_s_per_gpu:,.0f} tokens/s{marked}."
    ]


def _input(plan: Plan) -> list[str]:
    """Notes on what may be slower than the GPUs: the host, the data, or unfused attention."""
    hints = []
    workload = plan.workload
    if workload.model.attention_cap is not None and workload.cluster.device.name != "cpu":
        hints.append(
            f"{workload.model.name} caps attention's scores, which no fused kernel here does: plain products compute "
            "them a block of queries at a time, several times as slowly; counted from that code, never measured."
        )
    if plan.step.other > MUCH * plan.step.seconds:
        share = plan.step.other / plan.step.seconds
        hints.append(
            f"{share:.0%} of the step is kernel-launch overhead on the host: use a larger micro-batch or compile."
        )
    if plan.step.seconds < HASTY:
        rate = plan.tokens_per_s
        hints.append(
            f"At {1 / plan.step.seconds:.0f} steps/s and {rate:,.0f} tokens/s, input may be the bottleneck: "
            "tokenise ahead with shoal data prepare."
        )
    return hints


def duration(seconds: float) -> str:
    """``38 ms``, ``1.24 s``, ``3.2 h``, ``12 days``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 2 * HOUR:
        return f"{seconds / 60:.3g} minutes"
    if seconds < 3 * DAY:
        return f"{seconds / HOUR:.3g} h"
    if seconds < 1000 * DAY:
        return f"{seconds / DAY:.3g} days"
    return f"{seconds / DAY / 365.25:,.3g} years"
