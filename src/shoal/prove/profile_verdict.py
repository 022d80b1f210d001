"""A profile's verdict in words: what stands out, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.facts.cluster.devices import Link
from shoal.facts.layout import ONE_CHUNK
from shoal.facts.strategies import BY_NAME, CONTROL, SHARD, purpose_of
from shoal.predict.memory import ledger
from shoal.predict.workload import Workload
from shoal.prove.measured_bubble import MeasuredPipeline

# Parts of a step at or above these fractions deserve a user's attention.
INPUT_WAIT = 0.05
EXPOSED = 0.10
BUBBLE = 0.15
OPTIMIZER = 0.15
RECOMPUTE = 0.05
HOST_GAPS = 0.15
COPIES = 0.10
# How far apart two things may be that should be alike.
UNEVEN_STAGES = 1.25
STRAGGLER = 1.2
SPREAD = 0.3
WAITS_LONGER = 1.25
STEP_ERROR = 0.15
MEMORY_ERROR = 0.03


@dataclass(frozen=True)
class Evidence:
    """What a verdict is based on. Parts are fractions of an uninstrumented step."""

    workload: Workload
    seconds: float
    predicted_seconds: float
    peak: int
    predicted_peak: int
    input_wait: float = 0.0
    exposed_comm: float = 0.0
    optimizer: float = 0.0
    recompute: float = 0.0
    host_gaps: float = 0.0
    copies: float = 0.0
    links: tuple[str, ...] = ()  # groups that communicate, longest predicted time first
    pipeline: MeasuredPipeline | None = None
    stages: tuple[dict[int, float], ...] = ()  # per stage its ranks, with the seconds that each computes
    spread: float = 0.0
    rates: str = ""  # the source of the predicted times
    rates_measured: bool = False
    shared: bool = False  # several ranks share a device


def verdict(evidence: Evidence) -> list[str]:
    """The largest part of the step first; then what else is odd."""
    found = []
    if not evidence.shared:  # with a shared device, fractions of the time mean nothing
        found = [text for _, text in sorted(_parts(evidence), key=lambda part: -part[0])]
        found += _stragglers(evidence)
    found += _prediction(evidence)
    if evidence.spread > SPREAD:
        found.append(
            f"timed steps differ by {evidence.spread:.0%}: something else is using this machine; profile again when "
            "it is idle"
        )
    return found or ["nothing stands out"]


def _parts(evidence: Evidence) -> Iterator[tuple[float, str]]:
    layout = evidence.workload.layout
    if evidence.input_wait >= INPUT_WAIT:
        yield (
            evidence.input_wait,
            f"input wait {evidence.input_wait:.0%} of the step: batches arrive late; keep data.cache on a faster disk, "
            "or leave a core free for every rank's loader",
        )
    if evidence.exposed_comm >= EXPOSED:
        yield evidence.exposed_comm, _communication(evidence)
    if evidence.pipeline is not None and evidence.pipeline.measured >= BUBBLE:
        yield evidence.pipeline.measured, _bubble(evidence, evidence.pipeline)
    if evidence.optimizer >= OPTIMIZER:
        spread = "" if layout.fsdp > 1 else ", or fsdp, so that each rank updates only a shard"
        yield (
            evidence.optimizer,
            f"optimizer {evidence.optimizer:.0%} of the step: more tokens per step (recipe.batch){spread}",
        )
    if evidence.recompute >= RECOMPUTE:
        kept = replace(evidence.workload, layout=layout.replace(recompute="none"))
        if layout.recompute != "none" and ledger(kept).fits:
            yield (
                evidence.recompute,
                f"recomputation {evidence.recompute:.0%} of the step, and it fits without: recompute=none",
            )
    if evidence.host_gaps >= HOST_GAPS:
        on_cpu = evidence.workload.cluster.device.name == "cpu"
        lost = (
            "Python overhead between operators" if on_cpu else "the device waits for Python to launch kernels"
        )
        yield (
            evidence.host_gaps,
            f"host gaps {evidence.host_gaps:.0%} of the step: {lost}; {_larger_kernels(evidence)}",
        )
    if evidence.copies >= COPIES:
        yield (
            evidence.copies,
            f"copies to and from the host {evidence.copies:.0%} of the step: "
            f"{'offload a smaller fraction' if layout.offload else 'something reads tensors back every step'}",
        )


def _communication(evidence: Evidence) -> str:
    group = evidence.links[0] if evidence.links else CONTROL
    link = _link(evidence.workload, group)
    what, fix = BY_NAME.get(purpose_of(group), BY_NAME[SHARD]).exposed
    return f"{what} exposed for {evidence.exposed_comm:.0%} of the step, over {link.kind}: {fix}"


def _link(workload: Workload, group: str) -> Link:
    """The link that a group's ranks use; the slowest one, if they are far apart."""
    cluster = workload.cluster
    _, ranks, stride = workload.ranks_of(group)
    domain = cluster.fast_domain if cluster.fast else cluster.devices_per_node
    return (cluster.fast or cluster.device.host_link) if ranks * stride <= domain else cluster.network


def _bubble(evidence: Evidence, pipeline: MeasuredPipeline) -> str:
    workload, layout = evidence.workload, evidence.workload.layout
    mean = sum(pipeline.busy) / len(pipeline.busy)
    slowest = max(range(len(pipeline.busy)), key=pipeline.busy.__getitem__)
    text = f"bubble {pipeline.measured:.0%} of the pipeline's time"
    if pipeline.measured > pipeline.scheduled * WAITS_LONGER:
        return (
            f"{text}, where the schedule leaves {pipeline.scheduled:.0%}: messages arrive late, "
            "so the link between stages is slow or cores are too few"
        )
    if pipeline.busy[slowest] > mean * UNEVEN_STAGES and pipeline.scheduled > pipeline.even * WAITS_LONGER:
        return (
            f"{text}: pipeline rank {slowest} computes {pipeline.busy[slowest] / mean:.1f} times as long as "
            "the mean; a smaller pp or more chunks balances the stages"
        )
    if workload.micro > 1:
        fix = f"more micro-batches (micro={workload.micro // 2})"
    else:
        fix = "more micro-batches (a larger recipe.batch)"
    return f"{text}: {fix}" + (" or schedule=zbv" if layout.schedule in ONE_CHUNK else "")


def _larger_kernels(evidence: Evidence) -> str:
    workload = evidence.workload
    if workload.accumulation > max(1, workload.layout.pp):
        return f"a larger micro-batch (micro={workload.micro * 2})"
    if workload.layout.tp > 1:
        return "a smaller tp leaves each rank larger kernels"
    return "a larger recipe.batch, or fewer ranks"


def _stragglers(evidence: Evidence) -> Iterator[str]:
    """Ranks of one stage compute the same; a slower one holds up all others."""
    for number, ranks in enumerate(evidence.stages):
        slowest = max(ranks, key=ranks.__getitem__)
        others = [seconds for rank, seconds in ranks.items() if rank != slowest]
        if others and ranks[slowest] > STRAGGLER * sum(others) / len(others):
            longer = ranks[slowest] * len(others) / sum(others) - 1
            stage = f" of stage {number}" if len(evidence.stages) > 1 else ""
            yield (
                f"rank {slowest} computes {longer:.0%} longer than the other ranks{stage}: check its clock, its "
                "temperature and what else runs on it"
            )


def _prediction(evidence: Evidence) -> Iterator[str]:
    ratio = evidence.seconds / evidence.predicted_seconds
    if evidence.shared:
        yield "ranks share a device: memory is comparable, times are not"
    elif abs(ratio - 1) > STEP_ERROR:
        if ratio > 2:
            apart = f"takes {ratio:.1f} times as long as predicted"
        else:
            apart = f"is {abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than predicted"
        because = (
            "the machine has changed since, or something else is using it" if evidence.rates_measured else ""
        )
        reason = "; ".join(part for part in (f"rates: {evidence.rates}", because) if part)
        yield f"the step {apart} ({reason}): shoal profile --calibrate measures this machine"
    off = evidence.predicted_peak / evidence.peak - 1
    if abs(off) > MEMORY_ERROR:
        yield (
            f"peak memory is predicted {abs(off):.1%} too {'high' if off > 0 else 'low'}: allow for that when "
            "planning"
        )
